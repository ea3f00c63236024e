r"""The definition of a Llama: every layer, tokenizer and quantizer as a function of NumPy arrays in float64.

This package is a book, and its files are the pages. Each begins with a paper, its equations and what to remember, and
then says the same once more as a function with an example that runs. Nothing here is fast, keeps a state, or imports
another package of this repository. The fast implementation (`model/`, `pallas_kernels/`) is held to these definitions
by `verify/`.

Order of reading
----------------
1. embedding, linear, add                    what a model is made of
2. rmsnorm, softmax, logsumexp, swiglu       one vector at a time; softmax also in the online form that kernels use
3. rope, capped, attention                   positions as rotations; what a token takes from those before it
   sinusoidal, alibi                         two other ways to know positions, for comparison
4. qk_norm, moe                              what Qwen3 and Mixtral add
   gelu, geglu, clamped_swiglu               what Gemma and gpt-oss have in place of SwiGLU
   layernorm, squared_relu                   what Starcoder 2, StableLM 2 and Nemotron have instead
5. config, llama                             the whole model: blocks, cache, logits
6. sampling, argmax                          from logits to a token
7. sentencepiece_bpe, byte_bpe               from text to tokens
8. quantizers                                fewer bits a weight: blocks, symmetric and packing first, then affine,
                                             ggml_blocks, nf4, minifloat, gptq and the others, a family a file
9. cached_attention, fused                   the same layers as kernels see them: over a cache, several at once
10. losses, backward                         what training makes small, and the gradient that each layer passes back
11. collectives, parallel                    what several devices exchange, and who computes what

Notation
--------
Equations use subscripts for the elements of an array, and code uses words:

    dim        length of a token's vector x         heads, kv_heads   query heads; heads of keys and values
    seq, keys  tokens that are new; tokens in all   head_dim          length of a head's vector (d in the papers)
    ffn        length of the inner vector           vocab             number of tokens
    rows, cols outputs and inputs of a weight       blocks, group     runs of weights that share a scale

A weight W is stored [rows, cols] and applied as W x; <a, b> is a sum of products; the weights of a norm are g. In
losses and backward passes dx is the gradient of the loss for x, of the shape of x. In quantizers w^ is what a weight w
became: dequantize of its quantize, for which the laws below write Q(w).

Shapes are annotations of jaxtyping. `Float[np.ndarray, "*batch heads head_dim"]` is an array of floats whose last two
axes are named; `*batch` is any number of axes before them, and a leading space as in `" dim"` marks a single axis. One
name is one length within a call, which the tests check.

Arithmetic
----------
Every function computes in float64, whatever the dtype of its arguments. float64 rounds by 2^-53 of a number, so for the
float32 and bfloat16 implementations that are judged here a result is as good as exact.

`rint` rounds to the nearest integer, and a *tie*, halfway between two, to the even one: rint(2.5) is 2 and rint(3.5) is
4. Formats of others may round ties away from zero; their pages say so.

u is the largest relative error of one rounding: 2^-24 in float32, 2^-8 in bfloat16. gamma_n = n u / (1 - n u) bounds
that of n roundings (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). A sum of n products, added in
any order, is off by at most gamma_n sum_i |w_i x_i|. A bound is always such a formula, and never a tolerance that was
chosen. fl(x) is x rounded to float32. Below 2^-126 float32 has *denormal* numbers, which lie 2^-149 apart: rounding to
one is off by up to 2^-150, which may be more than u times it. That is why many guarantees end in a term with 2^-150.

Three laws of quantizers are stated on their pages in short, and mean this:

- *Fixed point.* To quantize what was dequantized changes nothing: the codes and scales come out the same. A quantizer
  is then a projection onto the numbers that its format holds.
- *Powers of two pass into the scale.* Weights times 2^k have the same codes, and a scale times 2^k. Multiplying by a
  power of two rounds nothing, as long as no number leaves the range of its format.
- *Odd.* Q(-w) = -Q(w): the grid of numbers that a block can hold is the same on both sides of zero."""
