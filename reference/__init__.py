r"""The definition of a Llama: every layer, tokenizer and quantizer as a function of NumPy arrays in float64.

This package is a book, and its files are the pages. Each page names its paper, gives the equations and one thing to
remember. Then a function computes these equations, with an example that runs. Nothing here is fast, keeps state, or
imports other packages of this repository. `verify/` checks the fast implementation (`model/`, `pallas_kernels/`)
against these definitions.

Order of reading
----------------
1. embedding, linear, add                    what a model is made of
2. rmsnorm, softmax, logsumexp, swiglu       one vector at a time; softmax also in the online form that kernels use
3. rope, capped, attention                   positions as rotations; how a token uses the tokens before it
   sinusoidal, alibi                         two other ways to encode positions, for comparison
4. qk_norm, moe                              what Qwen3 and Mixtral add
   gelu, geglu, clamped_swiglu               what Gemma and gpt-oss use instead of SwiGLU
   layernorm, squared_relu                   what Starcoder 2, StableLM 2 and Nemotron use instead
5. plain_llama                               Llama 3, whole, on one page
   config, llama                             the same with a cache and with the switches of other families
6. sampling, argmax, threefry                from logits to a token, with random bits
7. sentencepiece_bpe, byte_bpe               from text to tokens
8. quantizers                                fewer bits per weight: blocks, symmetric and packing first, then affine,
                                             ggml_blocks, nf4, minifloat, gptq and more, one family per file
9. cached_attention, fused                   the same layers as kernels see them: over a cache, several at once
10. losses, backward                         what training minimizes, and the gradient that each layer passes back
    lora, packing                            what an adapter learns; several documents in one sequence
11. collectives, parallel                    what several devices exchange, and what each of them computes

Notation
--------
Equations use subscripts for the elements of an array. Code uses words:

    dim        length of a token's vector x         heads, kv_heads   query heads; heads of keys and values
    seq, keys  new tokens; all tokens so far        head_dim          length of a head's vector (d in the papers)
    ffn        length of the inner vector           vocab             number of tokens
    rows, cols outputs and inputs of a weight       blocks, group     runs of weights with a common scale

A weight W is stored [rows, cols] and applied as W x. <a, b> is a sum of products, and g are the weights of a norm. In
losses and backward passes, dx is the gradient of the loss with respect to x, with the shape of x. In quantizers, w^ is
the weight after quantizing and dequantizing w. The laws below write it as Q(w).

Shapes are jaxtyping annotations. `Float[np.ndarray, "*batch heads head_dim"]` is an array of floats with two named axes
at the end and any number of axes, `*batch`, before them. A leading space, as in `" dim"`, marks a single axis. Within
one call, every axis with the same name has the same length; the tests check this.

Arithmetic
----------
Every function converts its arguments to float64 and computes in float64. The relative rounding error of float64 is
2^-53. Compared with the float32 and bfloat16 implementations that we check, such a result is practically exact.

`rint` rounds to the nearest integer. A *tie*, halfway between two integers, goes to the even one: rint(2.5) is 2 and
rint(3.5) is 4. Some external formats round ties away from zero; their pages say so.

u is the largest relative error of one rounding: 2^-24 in float32, 2^-8 in bfloat16. gamma_n = n u / (1 - n u) bounds
the relative error of n roundings (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). A sum of n
products, added in any order, has an error of at most gamma_n sum_i |w_i x_i|. Every bound in this repository is such a
formula, never a hand-picked tolerance. fl(x) is x rounded to float32. Below 2^-126, float32 has *denormal* numbers with
a spacing of 2^-149. Rounding to one of them has an error of up to 2^-150, which may be more than u times the number.
That is why many guarantees end with a term in 2^-150.

The pages of quantizers refer to three laws by name:

- *Fixed point.* Q(Q(w)) = Q(w): quantizing dequantized weights changes nothing. Such a quantizer is a projection onto
  the numbers of its format.
- *Powers of two.* Multiplying the weights by 2^k multiplies only the scale by 2^k, and leaves the codes unchanged.
  Multiplying by a power of two rounds nothing, as long as no number leaves the range of its format.
- *Sign.* Q(-w) = -Q(w). This needs a format with numbers that are symmetric around zero.
"""
