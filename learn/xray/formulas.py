"""The equation of each definition, written with the letters of the definition's docstring."""

from llamaspec.learn.mathml import block

FORMULAS: dict[str, str] = {
    name: block(formulas)
    for name, formulas in {
        "rmsnorm": "y_i = g_i x_i / sqrt(mean_j(x_j^2) + eps)",
        "linear": "y = W x + b",
        "add": "x <- x + f(x)",
        "swiglu": "y_i = silu(a_i) b_i    silu(a) = a / (1 + exp(-a))",
        "frequencies": "f_i = theta^(-2i / d)",
        "rope_halves": "a -> a cos(m f_i) - b sin(m f_i)    b -> b cos(m f_i) + a sin(m f_i)",
        "attention": "o_ih = sum_j p_hij v_jg    g = h kv_heads // heads",
        "attention_weights": "p_hij = softmax_j(<q_ih, k_jg> / sqrt(head_dim) + M_ij)",
        "causal_mask": "M_ij = 0 where j <= i, else -inf",
        "softmax": "p_i = exp(x_i - m) / sum_j exp(x_j - m)    m = max_j x_j",
        "qk_norm": "q_h -> RMSNorm(q_h, g_q)    k_h -> RMSNorm(k_h, g_k)",
        "moe": "p = softmax(W_r x)    y = sum_{e in T} p_e / (sum_{t in T} p_t) f_e(x)    "
        "T = the n most probable experts",
    }.items()
}
