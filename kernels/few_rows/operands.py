"""What the few-row program multiplies: rows and weights as they come, and the product of a step."""

import triton
import triton.language as tl

from specdec.kernels.chain import ask_for_bytes


@triton.jit
def ask_for_rows(rows_ptr, first, K: tl.constexpr, COUNT: tl.constexpr):
    """COUNT elements from `first` on of each row, in pieces; nothing past the row's K.

    K is a multiple of 64 elements of 16 bits and no less than a piece, as in every plan's product.
    """
    PIECES: tl.constexpr = (COUNT + 127) // 128
    PIECE: tl.constexpr = COUNT // PIECES
    BYTES: tl.constexpr = PIECE * rows_ptr.dtype.element_ty.primitive_bitwidth // 8
    at = tl.minimum(first + tl.arange(0, PIECES) * PIECE, K - PIECE)
    address = rows_ptr[:, None] + at[None, :]
    ask_for_bytes(address, tl.full(address.shape, BYTES, tl.int32))


@triton.jit
def _e4m3_to_bf16(weights):
    """Bytes as the numbers they stand for, in plain instructions: conversions run at a quarter of
    their rate.

    A byte's sign goes to the top of a half, its other bits into exponent and mantissa; 2^120 is
    between the two types' exponents, and -0 changes no sum. Values below the least normal one come
    out right, NaN as 480.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 pair, rest, factor, zero;
        mov.b32 factor, 0x7B807B80;
        mov.b32 zero, 0x80008000;
        prmt.b32 pair, $2, 0, 0x1404;
        shr.b32 rest, pair, 4;
        and.b32 rest, rest, 0x07F007F0;
        lop3.b32 pair, pair, 0x80008000, rest, 0xEA;
        fma.rn.bf16x2 $0, pair, factor, zero;
        prmt.b32 pair, $2, 0, 0x3424;
        shr.b32 rest, pair, 4;
        and.b32 rest, rest, 0x07F007F0;
        lop3.b32 pair, pair, 0x80008000, rest, 0xEA;
        fma.rn.bf16x2 $1, pair, factor, zero;
        }""",
        "=r,=r,r",
        [weights],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _of_type(weights, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Weights in another type; bytes are e4m3 values."""
    if weights.dtype != tl.uint8:
        typed = weights.to(dtype)
    elif COMPILED and dtype == tl.bfloat16:
        typed = _e4m3_to_bf16(weights)
    else:
        typed = weights.to(tl.float8e4nv, bitcast=True).to(dtype)
    return typed


@triton.jit
def load_weights(
    rows_ptr,
    at,
    is_own,
    dtype: tl.constexpr,
    K: tl.constexpr,
    INSIDE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """[outputs, K part]: elements `at` of each row.

    Zeros where they may lie past K, and for the outputs where `is_own`, if there is one, is False.
    """
    pointers = rows_ptr[:, None] + at[None, :]
    if INSIDE and is_own is None:
        weights = tl.load(pointers)
    elif INSIDE:
        weights = tl.load(pointers, mask=is_own[:, None], other=0)
    elif is_own is None:
        weights = tl.load(pointers, mask=(at < K)[None, :], other=0)
    else:
        weights = tl.load(pointers, mask=(at < K)[None, :] & is_own[:, None], other=0)
    return _of_type(weights, dtype, COMPILED)


@triton.jit
def load_rows(rows_ptr, at, is_row, dtype: tl.constexpr, K: tl.constexpr, INSIDE: tl.constexpr):
    """[rows, K part]; masked as `load_weights`."""
    mask = is_row[:, None]
    if not INSIDE:
        mask = mask & (at < K)[None, :]
    return tl.load(rows_ptr[:, None] + at[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def product(x, weights, sums, SWAP_AB: tl.constexpr):
    """sums (None: zeros) + x @ weights.T [rows, outputs]; SWAP_AB: the transpose, weights first."""
    if SWAP_AB:
        sums = tl.dot(weights, tl.trans(x), sums, input_precision="ieee")
    else:
        sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit
def plus_product(
    sums,
    x,
    weights,
    scale_ptr,
    weight_row,  # [outputs], or one number whose block is theirs
    at,  # the first of the part of K
    K: tl.constexpr,
    SCALED: tl.constexpr,  # weights under one scale in either direction
    SWAP_AB: tl.constexpr,
):
    """sums + `product` of a part of K, times the scales of its weights' blocks if there are any."""
    if scale_ptr is None:
        sums = product(x, weights, sums, SWAP_AB)
    else:
        columns: tl.constexpr = (K + SCALED - 1) // SCALED
        column = tl.minimum(at // SCALED, columns - 1)  # parts past K have weights of zero
        scale = tl.load(scale_ptr + weight_row // SCALED * columns + column)
        if SWAP_AB and scale.numel > 1:
            scale = scale[:, None]  # outputs come first
        sums += product(x, weights, None, SWAP_AB) * scale
    return sums
