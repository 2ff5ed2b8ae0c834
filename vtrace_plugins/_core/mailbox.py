"""Pairs of numbers from programs of a launch to others of the same launch, through memory that nobody cleared.

A pair is two words, each a float32 and the launch's tag: a word is written and read as a whole, so one that has the tag
has its number. Who waits for a pair clears it afterwards: the tag is nowhere when the launch is over, and may be used
again (a CUDA graph replayed). A place has one sender and one receiver.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # it has no assembly, and runs programs in sequence

# Each thread waits for itself: a loop of triton's would be one for all warps, and they need not agree on when to leave.
_TAKE = tl.constexpr("""
{
    .reg .pred missing, wanted;
    .reg .b64 word_a, word_b, nothing;
    .reg .b32 a, b, tag_a, tag_b;
    mov.b64 word_a, $3;
    mov.b64 word_b, $4;
AGAIN:
    mov.b64 {a, tag_a}, word_a;
    mov.b64 {b, tag_b}, word_b;
    setp.ne.s32 missing, tag_a, $5;
    setp.ne.or.s32 missing, tag_b, $5, missing;
    @!missing bra DONE;
    ld.relaxed.gpu.global.v2.b64 {word_a, word_b}, [$2];
    bra AGAIN;
DONE:
    setp.ne.s32 wanted, $6, 0;
    mov.b64 nothing, 0;
    @wanted st.relaxed.gpu.global.v2.b64 [$2], {nothing, nothing};
    mov.b32 $0, a;
    mov.b32 $1, b;
}
""")


@triton.jit
def tagged(x, tag):
    return (tag.to(tl.int64) << 32) | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def send(words, place, mask, a, b, tag):
    tl.atomic_xchg(words + 2 * place, tagged(a, tag), mask=mask, sem="relaxed")
    tl.atomic_xchg(words + 2 * place + 1, tagged(b, tag), mask=mask, sem="relaxed")


@triton.jit
def receive(words, place, mask, tag):
    """The pair (a, b) of each place; (0, 0) outside ``mask``.

    The tile must have a place for each thread, which then has it to itself. A smaller one would be in several threads,
    and triton is free to repeat a small load: each would wait and clear on its own.
    """
    nothing = tag.to(tl.int64) << 32
    word_a = tl.load(words + 2 * place, mask=mask, other=nothing, volatile=True)
    word_b = tl.load(words + 2 * place + 1, mask=mask, other=nothing, volatile=True)
    if INTERPRETED:
        there = ((word_a >> 32) == tag) & ((word_b >> 32) == tag)  # every sender has run
        a, b = tl.where(there, word_a.to(tl.int32), -1), tl.where(there, word_b.to(tl.int32), -1)  # NaN, if not
        tl.store(words + 2 * place, 0, mask=mask)
        tl.store(words + 2 * place + 1, 0, mask=mask)
    else:
        given = [words + 2 * place, word_a, word_b, tag, mask.to(tl.int32)]
        a, b = tl.inline_asm_elementwise(_TAKE, "=r,=r,l,l,l,r,r", given, (tl.int32, tl.int32), is_pure=False, pack=1)
    return a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)
