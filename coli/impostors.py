"""What downloads leave in place of the real file, recognised by its first bytes.

For readers of model files in `store` and `text`; knows no format and raises nothing.
"""


def impostor(start: bytes) -> str | None:
    """What a file that begins with `start` is and what to do, if it is known not to be a model's file."""
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: run `git lfs pull` in its folder or download the file"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (of a login or an error?), not the file itself: download it again"
    return None
