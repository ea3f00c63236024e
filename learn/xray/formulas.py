"""The equation of each definition in MathML, which browsers typeset and screen readers read aloud.

The letters are the same as in the definition's docstring. `row` reads words that are separated by spaces, and the
functions below it build all other elements.
"""

from html import escape

GREEK = {"theta": "θ", "eps": "ε"}
UPRIGHT = {"exp", "max", "cos", "sin", "softmax", "silu", "swiglu", "RMSNorm", "mean"}
SPACE = '<mspace width="0.2em"/>'


def row(*parts: str) -> str:
    """Put parts side by side. A part is a MathML element, or words separated by spaces. `a_b` is a with the index b.

    >>> row("y_i = 2")
    '<mrow><msub><mi>y</mi><mi>i</mi></msub><mo>=</mo><mn>2</mn></mrow>'
    """
    elements = (part if part.startswith("<") else "".join(map(_word, part.split())) for part in parts)
    return f"<mrow>{''.join(elements)}</mrow>"


def _word(word: str) -> str:
    base, _, index = word.partition("_")
    if base and index and word not in ("kv_heads", "head_dim"):
        apart = index.isalpha() and len(index) < 4 and index not in GREEK
        return f"<msub>{_word(base)}{row(' '.join(index)) if apart and len(index) > 1 else _word(index)}</msub>"
    if word.isdigit():
        return f"<mn>{word}</mn>"
    if word in UPRIGHT:
        apart = SPACE if word in ("cos", "sin") else ""
        return f'{apart}<mi mathvariant="normal">{word}</mi>{apart}'
    if word.replace("_", "").isalpha():
        return f"<mi>{GREEK.get(word, word)}</mi>" if len(word) < 2 or word in GREEK else f"<mtext>{word}</mtext>"
    return f"<mo>{escape(word.replace('-', '−'))}</mo>"


def fraction(top: str, bottom: str) -> str:
    """Return the fraction `top` / `bottom`."""
    return f"<mfrac>{row(top)}{row(bottom)}</mfrac>"


def root(*parts: str) -> str:
    """Return the square root of `parts`."""
    return f"<msqrt>{row(*parts)}</msqrt>"


def power(base: str, exponent: str) -> str:
    """Return `base` to the power `exponent`."""
    return f"<msup>{row(base)}{row(exponent)}</msup>"


def under(operator: str, index: str) -> str:
    """Return an operator such as a sum or a maximum, with its index below it."""
    return f'<munder><mo lspace="0.2em" rspace="0.2em">{operator}</mo>{row(index)}</munder>'


def lines(*rows: str) -> str:
    """Return formulas below each other."""
    return "".join(f'<math display="block">{equation}</math>' for equation in rows)


FORMULAS: dict[str, str] = {
    "rmsnorm": lines(row("y_i =", fraction("g_i x_i", root("mean_j (", power("x_j", "2"), ") + eps")))),
    "linear": lines(row("y = W x + b")),
    "add": lines(row("x ← x + f ( x )")),
    "swiglu": lines(
        row("y_i = silu ( a_i )", SPACE, "b_i"),
        row("silu ( a ) =", fraction("a", row("1 + exp ( - a )"))),
    ),
    "frequencies": lines(row("f_i =", power("theta", "- 2 i / d"))),
    "rope_halves": lines(
        row("a ↦ a cos ( m f_i ) - b sin ( m f_i )"),
        row("b ↦ b cos ( m f_i ) + a sin ( m f_i )"),
    ),
    "attention": lines(
        row("o_ih =", under("∑", "j"), "p_hij", SPACE, "v_jg"),
        row("g = ⌊ h", SPACE, "kv_heads / heads ⌋"),
    ),
    "attention_weights": lines(
        row("p_hij = softmax_j (", fraction("⟨ q_ih , k_jg ⟩", root("head_dim")), "+ M_ij )"),
    ),
    "causal_mask": lines(row("M_ij = 0", SPACE, "where", SPACE, "j ≤ i ,", SPACE, "else", SPACE, "- ∞")),
    "softmax": lines(
        row("p_i =", fraction("exp ( x_i - m )", row(under("∑", "j"), "exp ( x_j - m )"))),
        row("m =", under("max", "j"), "x_j"),
    ),
    "qk_norm": lines(row("q_h ↦ RMSNorm ( q_h , g_q )"), row("k_h ↦ RMSNorm ( k_h , g_k )")),
    "moe": lines(
        row("p = softmax ( W_r x )"),
        row("y =", under("∑", "e ∈ T"), fraction("p_e", row(under("∑", "t ∈ T"), "p_t")), SPACE, "f_e ( x )"),
        row("T =", "<mtext>the</mtext>", SPACE, "n", SPACE, "<mtext>most probable experts</mtext>"),
    ),
}
