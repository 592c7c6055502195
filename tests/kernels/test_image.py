"""Images of object files that LLVM writes: what they call and read is found, what is not known is refused."""

import ctypes

import numpy as np
import pytest
from llvmlite import binding

from coli.kernels import image

FILL = """
@table = private constant [3 x i64] [i64 7, i64 11, i64 13]
@other = private constant [32 x i8] c"01234567890123456789012345678901", align 32
@count = internal global i64 0
declare ptr @memset(ptr, i32, i64)
declare i64 @labs(i64)
define internal i64 @inner(i64 %n) noinline {
  %at = getelementptr [3 x i64], ptr @table, i64 0, i64 %n
  %x = load i64, ptr %at
  ret i64 %x
}
define void @entry(i64 %address, i64 %n) {
  %p = inttoptr i64 %address to ptr
  %x = call i64 @inner(i64 %n)
  %minus = sub i64 0, %x
  %y = call i64 @labs(i64 %minus)
  %before = load i64, ptr @count
  %after = add i64 %before, 1
  store i64 %after, ptr @count
  %z = call ptr @memset(ptr %p, i32 1, i64 %y)
  %last = getelementptr i8, ptr %p, i64 31
  %c = load i8, ptr getelementptr ([32 x i8], ptr @other, i64 0, i64 9)
  %c64 = trunc i64 %after to i8
  %sum = add i8 %c, %c64
  store i8 %sum, ptr %last
  ret void
}
"""


def object_file(text: str, **options: str) -> bytes:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple = binding.get_process_triple()
    module = binding.parse_assembly(f'target triple = "{triple}"\n{text}')
    return binding.Target.from_triple(triple).create_target_machine(opt=1, **options).emit_object(module)


def test_constants_functions_data_and_the_c_library_are_found():
    code = image.link(object_file(FILL, reloc="pic", codemodel="small"), "entry")
    assert code.startswith(image.MAGIC)
    entry = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(image.load(code))
    for call, count in enumerate((7, 11, 13)):
        memory = np.zeros(32, np.uint8)
        entry(memory.ctypes.data, call)
        assert memory[:31].tolist() == [1] * count + [0] * (31 - count)
        assert memory[31] == ord("9") + call + 1


def test_two_copies_of_an_image_share_nothing():
    code = image.link(object_file(FILL, reloc="pic", codemodel="small"), "entry")
    for address in (image.load(code), image.load(code)):
        memory = np.zeros(32, np.uint8)
        ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)(memory.ctypes.data, 0)
        assert memory[31] == ord("9") + 1


def test_references_by_address_are_refused():
    with pytest.raises(image.Unlinkable, match="reference of kind 1"):
        image.link(object_file(FILL, reloc="static", codemodel="large"), "entry")


def test_data_that_is_not_zero_is_refused():
    text = "@data = global i64 5\ndefine void @entry() {\n  store i64 6, ptr @data\n  ret void\n}\n"
    with pytest.raises(image.Unlinkable, match="not zero"):
        image.link(object_file(text, reloc="pic", codemodel="small"), "entry")


def test_another_processor_is_refused():
    code = bytearray(object_file(FILL, reloc="pic", codemodel="small"))
    code[18] = 183  # AArch64
    with pytest.raises(image.Unlinkable, match="not an object file"):
        image.link(bytes(code), "entry")
