"""What triton 3.6's interpreter (TRITON_INTERPRET=1) lacks for liger-kernel's kernels, which parity.py runs on a CPU.

A kernel gets Python's floats there, where a compiled one gets tensors of float32. The functions of CUDA's libdevice
return nothing.
"""

import numpy as np


def complete() -> None:
    """To be called before liger_kernel is imported, which keeps these functions. Raises ImportError without triton."""
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
    libdevice.rsqrt = lambda x: tl.rsqrt(x)  # not tl.rsqrt itself, which the interpreter replaces while a kernel runs
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
