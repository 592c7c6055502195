"""How tests wait for what a page shows."""


def until(page, expression: str, arg: object = None) -> None:
    """Wait for it. Playwright's own wait_for_function evaluates in the page, which the page's policy forbids."""
    for _ in range(15_000):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"waited in vain for {expression}")
