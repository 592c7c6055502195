"""Machine code that needs no linker: one position-independent block that a process copies to memory and calls.

`link` makes it of an object file when a kernel has been compiled: x86-64 ELF, references within the file by distance,
those to the C library through a table of addresses. `load` puts it into memory and fills that table. So a process whose
kernels are compiled already loads no part of LLVM, whose library alone takes longer than everything here.

    "coliCODE", u32 entry, u32 fixed bytes (code and constants, whole pages), u32 all bytes (with the data behind them),
    u32 names bytes, names of C functions separated by spaces, whose addresses are the first words of the data, and the
    fixed bytes
"""

import ctypes
import mmap
import os
import struct
from typing import NamedTuple

MAGIC = b"coliCODE"
_HEAD = struct.Struct("<8sIIII")
_ELF, _SECTION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")
_SYMBOL, _RELOCATION = struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_X86_64 = 62
_PROGRAM, _SYMBOLS, _RELOCATIONS, _ZEROS = 1, 2, 4, 8  # kinds of sections
_WRITABLE, _IN_MEMORY = 1, 2  # flags of sections
_UNDEFINED, _COMMON = 0, 0xFFF2  # places of symbols
_BY_DISTANCE = (2, 4)  # kinds of relocations: PC32, PLT32
_JUMP = b"\xff\x25"  # jmp *distance(%rip)
_JUMP_BYTES = 8


_loaded: list[mmap.mmap] = []  # code is never given back: its addresses are everywhere


class Unlinkable(ValueError):
    """The object file holds what this linker does not know."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def link(code: bytes, symbol: str) -> bytes:
    """The image whose entry is the function `symbol` of an object file."""
    elf = _ELF.unpack_from(code)
    if elf[0][:6] != b"\x7fELF\x02\x01" or elf[2] != _X86_64:
        raise Unlinkable("not an object file of x86-64")
    sections = [_Section(*_SECTION.unpack_from(code, elf[6] + i * _SECTION.size)) for i in range(elf[12])]
    (table,) = (section for section in sections if section.kind == _SYMBOLS)
    names = sections[table.link].offset
    symbols = list(_SYMBOL.iter_unpack(code[table.offset : table.offset + table.size]))

    def name_of(at: int) -> str:
        return code[names + at : code.index(b"\0", names + at)].decode()

    # where everything lies: code and constants, jumps to C functions, then what is written to
    outside = [
        i for i, (name, _info, _other, place, _value, _size) in enumerate(symbols) if place == _UNDEFINED and name
    ]
    at, places = 0, {}
    for number, section in enumerate(sections):
        if section.flags & _IN_MEMORY and section.kind == _PROGRAM and not section.flags & _WRITABLE:
            at = _up(at, section.alignment)
            places[number] = at
            at += section.size
    jumps = _up(at, _JUMP_BYTES)
    fixed = _up(jumps + _JUMP_BYTES * len(outside), mmap.PAGESIZE)
    at = fixed + 8 * len(outside)
    for number, section in enumerate(sections):
        if section.flags & _WRITABLE and section.flags & _IN_MEMORY:
            if section.kind != _ZEROS:
                raise Unlinkable("data that is not zero")
            at = _up(at, section.alignment)
            places[number] = at
            at += section.size
    image = bytearray(fixed)
    for number, start in places.items():
        section = sections[number]
        if section.kind == _PROGRAM:
            image[start : start + section.size] = code[section.offset : section.offset + section.size]
    for number in range(len(outside)):
        here = jumps + _JUMP_BYTES * number
        struct.pack_into("<2si", image, here, _JUMP, fixed + 8 * number - (here + 6))

    # references
    address = {number: jumps + _JUMP_BYTES * i for i, number in enumerate(outside)}
    for number, (_name, _info, _other, place, value, size) in enumerate(symbols):
        if place == _COMMON:
            at = _up(at, value)
            address[number] = at
            at += size
        elif place in places:
            address[number] = places[place] + value
    for section in sections:
        if section.kind != _RELOCATIONS or section.info not in places:
            continue
        for offset, info, addend in _RELOCATION.iter_unpack(code[section.offset : section.offset + section.size]):
            if info & 0xFFFFFFFF not in _BY_DISTANCE or info >> 32 not in address:
                raise Unlinkable(f"a reference of kind {info & 0xFFFFFFFF}")
            here = places[section.info] + offset
            struct.pack_into("<i", image, here, address[info >> 32] + addend - here)
    entry = next(
        address[i] for i, (name, *_) in enumerate(symbols) if name and i in address and name_of(name) == symbol
    )
    imports = " ".join(name_of(symbols[i][0]) for i in outside).encode()
    return _HEAD.pack(MAGIC, entry, fixed, _up(max(at, fixed + 1), mmap.PAGESIZE), len(imports)) + imports + image


def load(image: bytes) -> int:
    """Address of the entry, in memory that is kept for the rest of the process."""
    _magic, entry, fixed, size, length = _HEAD.unpack_from(image)
    names = image[_HEAD.size : _HEAD.size + length].decode().split()
    library = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:fixed] = image[_HEAD.size + length :]
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    struct.pack_into(f"<{len(names)}Q", memory, fixed, *addresses)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if library.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(fixed), mmap.PROT_READ | mmap.PROT_EXEC):
        number = ctypes.get_errno()
        raise OSError(number, f"memory cannot be made executable: {os.strerror(number)}")
    _loaded.append(memory)
    return base + entry


def _up(at: int, alignment: int) -> int:
    return -(-at // max(alignment, 1)) * max(alignment, 1)
