"""Quantizers: fewer bits a weight, a family a file.

Read `blocks`, `symmetric` and `packing` first: which weights share a scale, the simplest codes, and how codes lie in
bytes. Every other page is one of these ideas:

    equal steps         affine, and with it ggml_blocks, llama2c, hqq, torchao_int4, bitnet, ggml_ternary, binary
    unequal steps       nf4, minifloat, kmeans, ggml_codebooks; mx and nvfp4 are minifloats with small scales
    scales of scales    double_quantization, ggml_superblocks
    points of a table   ggml_lattices with its ggml_grids
    codes from data     gptq, awq, smoothquant, llm_int8: what a layer is given decides where precision goes
    activations, cache  fixed_point, ggml_activations, kv_cache
    training, sparsity  qat, pruning

`schemes` and `ggml` name what a model's weights can be quantized with, and `ops` calls each by its name.
`docs/gallery.md` has all of them at work.
"""
