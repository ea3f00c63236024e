"""Quantizers: formats with fewer bits per weight. One family per file.

Read `blocks`, `symmetric` and `packing` first: the groups of weights with a common scale, the simplest codes, and the
layout of codes in bytes. Every other page applies one of these ideas:

    equal steps         affine, and with it ggml_blocks, llama2c, hqq, torchao_int4, mlx, bitnet, ggml_ternary, binary
    unequal steps       nf4, minifloat, kmeans, ggml_codebooks; mx and nvfp4 are minifloats with small scales
    scales of scales    double_quantization, ggml_superblocks with its ggml_search
    points of a table   ggml_lattices with its ggml_grids
    codes from data     gptq, awq, smoothquant, llm_int8: the inputs of a layer decide where precision is needed
    activations, cache  fixed_point, ggml_activations, kv_cache
    training, sparsity  qat, pruning

`schemes` and `ggml` list the named formats for a model's weights, and `ops` calls each by its name. `docs/gallery.md`
shows all of them applied to a model.
"""
