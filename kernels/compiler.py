"""From routines to machine code, with numba; the only module that compiles. Imported when something is not in the code
cache.

Machine code of a routine is one function of int64 arguments without a result. It refers to nothing outside itself but
the C library, so that a process can load it without numba.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core.codegen import JITCPUCodegen
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from coli.kernels.deferred import resolve
from coli.kernels.image import Unlinkable, link
from coli.kernels.target import Target, simd_path_of

I64 = ir.IntType(64)
OPTIONS = {"error_model": "numpy"}


def prepare(target: Target) -> None:
    """Compile for `target` from now on; once in a process, before anything is compiled."""
    numba.config.CPU_NAME, numba.config.CPU_FEATURES = target
    numba.config.LOOP_VECTORIZE = 0  # vectors are written out; automatic ones only cost compile time
    # Somebody else's decorators may have made numba read the processor's own features already.
    cpu_target.target_context._internal_codegen = JITCPUCodegen("numba.exec")
    if simd_path_of(target.features) != "avx512":
        # With 16 registers LLVM's machine scheduler loads early and spills; the order in which we emit is a third
        # faster. With 32 registers it is the other way round.
        binding.set_option("coli", "-enable-misched=false")


def machine_code(function: Callable[..., None], arguments: int, symbol: str) -> bytes:
    """The function as a C function of so many int64: an image, or where there are none an object file of `symbol`."""
    module = optimized(function, arguments, symbol)
    if not (sys.platform == "linux" and module.triple.startswith("x86_64")):
        return _machine(pic=False).emit_object(module)
    try:
        return link(_machine(pic=True).emit_object(module), symbol)
    except Unlinkable as problem:
        raise AssertionError(
            f"{symbol}: {problem}; a kernel must not raise, as a step of a range that may be 0 does"
        ) from None


def assembly(function: Callable[..., None], arguments: int) -> str:
    """What `machine_code` is made of, to read."""
    return _machine(pic=True).emit_assembly(optimized(function, arguments, "inspected"))


@functools.cache
def _machine(pic: bool) -> Any:
    """LLVM's code generator for our target. Code for LLVM's loader may lie far from what it calls."""
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    model = (
        {"reloc": "pic", "codemodel": "small"} if pic else {"reloc": "default", "codemodel": "jitdefault", "jit": True}
    )
    return binding.Target.from_triple(triple).create_target_machine(cpu=name, features=features, opt=3, **model)


@global_compiler_lock
def optimized(function: Callable[..., None], arguments: int, symbol: str) -> Any:
    """LLVM's module of the function and the entry `symbol`."""
    resolve(function.__globals__)
    result = _Compiler(function, cpu_target, OPTIONS, {}, Compiler).compile((types.int64,) * arguments, types.void)
    context, library, found = result.target_context, result.library, result.fndesc
    module = library.create_ir_module(symbol)
    convention = context.call_conv
    inner = ir.Function(module, convention.get_function_type(found.restype, found.argtypes), found.llvm_func_name)
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), symbol)
    builder = ir.IRBuilder(entry.append_basic_block())
    convention.call_function(builder, inner, found.restype, found.argtypes, entry.args, attrs=("noinline",))
    builder.ret_void()
    library.add_ir_module(module)
    library._finalize_final_module = lambda: None  # numba need not load it
    library.finalize()
    final = library._final_module
    outside = [f.name for f in final.functions if f.is_declaration and not f.name.startswith("llvm.")]
    assert not outside, f"{symbol} needs {outside}: a kernel must not allocate, raise nor call Python"
    return final


class _Compiler(_FunctionCompiler):
    """Leaves the library open for the entry."""

    def _customize_flags(self, flags):
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        flags.enable_pyobject = False
        return flags


def device(function: Callable[..., Any]) -> Any:
    """A jitted part of routines."""
    return numba.njit(**OPTIONS, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def caller(arguments: int) -> Any:
    """An intrinsic call_address(address, ...) of a routine with so many int64 arguments."""

    def codegen(context, builder, _sig, values):
        function = ir.FunctionType(ir.VoidType(), [I64] * arguments)
        builder.call(builder.inttoptr(values[0], function.as_pointer()), values[1:])
        return context.get_dummy_value()

    names = ", ".join(f"x{i}" for i in range(arguments + 1))
    scope = {"signature": types.void(*[types.int64] * (arguments + 1)), "codegen": codegen}
    exec(f"def call_address(typingctx, {names}):\n    return signature, codegen", scope)
    return intrinsic(scope["call_address"])


def unpacker(count: int) -> Any:
    """An intrinsic (args, first) -> tuple of `count` int64 arguments from number `first` on."""

    def codegen(context, builder, signature, values):
        base = builder.inttoptr(values[0], I64.as_pointer())
        index = [builder.add(values[1], ir.Constant(I64, i)) for i in range(count)]
        words = [builder.load(builder.gep(base, [i])) for i in index]
        return context.make_tuple(builder, signature.return_type, words)

    result = types.UniTuple(types.int64, count)

    @intrinsic
    def unpack(typingctx, args, first):
        return result(types.int64, types.int64), codegen

    return unpack
