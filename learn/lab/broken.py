"""The forty broken kernels, in five chapters."""

from llamaspec.learn.lab.exercise import Broken

GITHUB = "https://github.com/"
NORMS = "Softmax and norms"
POSITIONS = "Positions"
ATTENTION = "Attention and caches"
QUANTIZERS = "Quantizers"
SAMPLING = "Sampling and experts"

_TABLE = [
    # Each entry has the chapter, the op, the mutant, a user's report, a hint, and a project that made such a mistake.
    (
        NORMS, "softmax", "maximum starts at 0",
        "A row of very negative scores comes out as NaN or zeros.",
        "What is the maximum of a row in which every score is below -200?",
        "NNlib.jl subtracted the larger of 0 and the maximum.",
        "FluxML/NNlib.jl/pull/43",
    ),
    (
        NORMS, "softmax", "sum not rescaled when the maximum rises",
        "Rows that rise from left to right sum to less than 1.",
        "The sum was taken relative to an old maximum. What has to happen to it when the maximum rises?",
        "A FlashAttention example of TileLang lost the maximum of earlier blocks.",
        "tile-ai/tilelang/pull/1148",
    ),
    (
        NORMS, "softmax", "a row of -inf gives NaN",
        "One padded sequence turns a whole batch into NaN.",
        "What are the weights of a row that may see nothing, and what is 0/0?",
        "burn's attention gave NaN for rows that a mask hides altogether.",
        "tracel-ai/burn/issues/4694",
    ),
    (
        NORMS, "softmax", "maximum of the last block for every block",
        "Rows of up to 16 scores are right, longer ones rarely sum to 1.",
        "Which maximum is subtracted when the weights are written?",
        "FlashAttention's row maximum was wrong in a case that its users found.",
        "Dao-AILab/flash-attention/pull/2083",
    ),
    (
        NORMS, "rmsnorm", "eps outside the root",
        "Vectors of tiny numbers come out too small.",
        "Compare the order of the root and the sum with the formula.",
        "TileLang's RMSNorm added epsilon outside of the root.",
        "tile-ai/tilelang/pull/1243",
    ),
    (
        NORMS, "rmsnorm", "tail left out of the sum (Liger #519)",
        "Widths that are no multiple of 64 come out slightly too large.",
        "Count the columns that enter the sum when there are 100.",
        "Kernels of AITER are wrong for odd widths.",
        "ROCm/aiter/issues/5044",
    ),
    (
        NORMS, "rmsnorm", "rounded to bfloat16 before the weight",
        "Every result is off by up to half a percent.",
        "How often is each number rounded on its way?",
        "Hugging Face's Llama rounds there on purpose, and Transformer Engine does not: two contracts to tell apart.",
        "NVIDIA/TransformerEngine/issues/1132",
    ),
    (
        NORMS, "logsumexp", "tail padded with zeros",
        "Rows of negative scores give about the logarithm of a small whole number.",
        "What does a padded score of 0 add to the sum?",
        "verl's fused cross entropy counted exp(0) for every weight row that padded its last tile.",
        "verl-project/verl/pull/5349",
    ),
    (
        POSITIONS, "rope_halves", "pairs of neighbors",
        "The model babbles, though every tensor of the checkpoint was loaded.",
        "Two layouts exist. Which features are turned together, and where are the results put?",
        "AiDotNet loaded Hugging Face's checkpoints in the layout of Meta's.",
        "ooples/AiDotNet/pull/2074",
    ),
    (
        POSITIONS, "rope_halves", "positions from 0 in every chunk (tiny-llm #46)",
        "Prompts of one chunk are answered well, longer ones are not.",
        "Where does the second chunk of a prompt begin?",
        "tiny-llm counted positions wrongly after the first step with a cache.",
        "skyzh/tiny-llm/pull/46",
    ),
    (
        POSITIONS, "rope_halves", "second half from the first half's result",
        "Position 0 is right and all others are wrong.",
        "A rotation needs both old numbers for both new ones.",
        "A rotation in place of FlagGems may read what another of its warps has already turned.",
        "flagos-ai/FlagGems/issues/5142",
    ),
    (
        POSITIONS, "rope_halves", "position in bfloat16, where 257 is 256",
        "Texts are good up to 256 tokens and lose the thread after that.",
        "How many significant bits does a position of 1,000 need?",
        "candle built RoPE's tables for Qwen2 in bfloat16.",
        "huggingface/candle/pull/3520",
    ),
    (
        POSITIONS, "rope_halves", "turned the other way",
        "Scores depend on the distance, but near and far behave like a mirror image.",
        "Turn (1, 0) by a quarter on paper.",
        "nanochat turns the other way and keeps to it, since a model trained so needs it; others' checkpoints do not.",
        "karpathy/nanochat/pull/489",
    ),
    (
        POSITIONS, "rope_interleaved", "result in halves",
        "Scores are right, but a cache from another program does not fit.",
        "In which order are the results stored?",
        "vllm-metal concatenated what it should have interleaved.",
        "vllm-project/vllm-metal/pull/44",
    ),
    (
        POSITIONS, "rope_halves", "scaled frequencies ignored",
        "A Llama 3.1 is fine in short chats and forgets in long ones.",
        "Whose frequencies are used, the caller's or the kernel's own?",
        "Ten models of mlx-vlm ignored the rope_scaling that their configurations declare.",
        "Blaizzy/mlx-vlm/pull/1710",
    ),
    (
        POSITIONS, "norm_qkv", "appended a row late",
        "The first generated token is right, all after it are strange.",
        "Which row of the cache belongs to position 7?",
        "deepsparse put one token too many into a full cache.",
        "neuralmagic/deepsparse/pull/1447",
    ),
    (
        ATTENTION, "attention", "head h to key head h % kv_heads",
        "Models with as many key heads as query heads are right, others are not.",
        "Which query heads share key head 0 when there are 8 and 2?",
        "ONNX's Attention repeated key heads in the wrong order.",
        "onnx/onnx/pull/7274",
    ),
    (
        ATTENTION, "attention", "scores scaled by a width padded to 8",
        "Heads of 64 are right, heads of 20 are slightly too flat.",
        "By the root of which number are scores divided?",
        "An fp8 attention for images in a fork of SGLang scaled by the padded width.",
        "bytedance-iaas/sglang/pull/485",
    ),
    (
        ATTENTION, "attention", "weighted sum not rescaled",
        "Up to one block of keys the result is right.",
        "Two things were summed relative to the old maximum.",
        "The text that explains FlashMLA's kernel had the factor of this rescaling upside down.",
        "deepseek-ai/FlashMLA/pull/177",
    ),
    (
        ATTENTION, "attention", "mask multiplied in, so that hidden scores are 0",
        "The model looks into the future a little.",
        "What weight does a score of 0 get?",
        "Readers of BERT ask why the mask is added: multiplied in, it hides nothing.",
        "huggingface/transformers/issues/542",
    ),
    (
        ATTENTION, "attention_prefill", "offset of the first sequence for every sequence",
        "One sequence alone is right; in a batch, others see too much or too little.",
        "Every sequence has its own length before this chunk.",
        "tt-xla gave every row of a batch the cached length of row 0.",
        "tenstorrent/tt-xla/pull/5817",
    ),
    (
        ATTENTION, "attention_prefill", "window one too large",
        "A sliding window lets one more token through than the definition.",
        "Does a window of 3 count the query itself?",
        "transformers passed FlashAttention a window that was one too large.",
        "huggingface/transformers/issues/39408",
    ),
    (
        ATTENTION, "attention_decode", "longest length for every sequence",
        "The longest sequence of a batch is right, the others read leftovers.",
        "How many keys does each sequence have?",
        "JAX's attention ignored the lengths of the keys where those of the queries were not given, too.",
        "jax-ml/jax/issues/23349",
    ),
    (
        ATTENTION, "attention_decode", "totals of splits not rescaled",
        "Long caches, read in several splits, give weights that do not sum to 1.",
        "A split's total is relative to its own maximum.",
        "FlashInfer's log-sum-exp was wrong where the keys were split.",
        "flashinfer-ai/flashinfer/pull/58",
    ),
    (
        ATTENTION, "attention_paged", "last page left out if it is full",
        "The text is strange whenever its length is a multiple of the page.",
        "How many pages hold 32 keys, and how many 33?",
        "A vLLM kernel read beyond the block table where the last block had few pages.",
        "vllm-project/flash-attention/pull/42",
    ),
    (
        ATTENTION, "attention_paged", "table of the first sequence for every sequence",
        "Two users see parts of each other's text.",
        "Whose pages are read?",
        "Attention in accel ignored the page table of a prompt and read the wrong pages.",
        "golang-design/accel/issues/10",
    ),
    (
        QUANTIZERS, "quantize", "largest weight for largest magnitude",
        "Groups with one large negative weight are clipped.",
        "What is the scale of a group whose largest weight is 0.1 and whose smallest is -3?",
        "onediff took the largest weight, without its magnitude, for a scale.",
        "siliconflow/onediff/issues/893",
    ),
    (
        QUANTIZERS, "quantize", "truncated for rounded",
        "The error is twice what the format promises, always towards zero.",
        "What does a cast to an integer do with 2.9?",
        "SGLang's JAX port cast to int8 without rounding, so that half of all codes came out a step low.",
        "sgl-project/sglang-jax/pull/1598",
    ),
    (
        QUANTIZERS, "quantize", "fp8 not clipped",
        "The largest weight of a row becomes NaN.",
        "What does a cast to e4m3 give for a number just above 448?",
        "Casts to float8_e4m3fn give NaN beyond its range, which surprises those who expect saturation.",
        "jax-ml/ml_dtypes/issues/260",
    ),
    (
        QUANTIZERS, "pack", "sign runs into the other nibble",
        "Every weight beside a negative one is wrong.",
        "What are the upper four bits of -1 in a byte?",
        "In sparkinfer's int4 decoding, a negative weight borrowed one from the weight in the next byte.",
        "gittensor-ai-lab/sparkinfer/pull/761",
    ),
    (
        QUANTIZERS, "ggml_encode", "half to even for half away from zero",
        "Files differ from llama.cpp's in a few codes.",
        "roundf and rint differ on exactly one kind of number.",
        "blueoil's training and its C++ code rounded ties differently.",
        "blue-oil/blueoil/issues/397",
    ),
    (
        QUANTIZERS, "dequantize", "scale of the group before",
        "The first group of a row is right.",
        "Which scale belongs to which columns?",
        "A kernel of vLLM read scales at negative offsets after its first block, where a row has one scale.",
        "vllm-project/vllm/pull/37329",
    ),
    (
        QUANTIZERS, "gemv_quantized", "summed in int8",
        "Small vectors are right, large ones wrap around.",
        "How large can a sum of 64 codes get?",
        "Triton's matmul gave int8 for a product of int8.",
        "triton-lang/triton/issues/2296",
    ),
    (
        QUANTIZERS, "ggml_decode", "neighbors share a byte",
        "Weights are all there, in the wrong order.",
        "Which two weights of a Q4_0 block share a byte?",
        "A converter of 1bit-MONSTER put neighbors into a byte, where ggml has weights i and i + 16.",
        "1bit-MONSTER/1bit-MONSTER/pull/572",
    ),
    (
        SAMPLING, "distribution", "penalty always divides",
        "A repetition penalty makes some words more frequent.",
        "What does dividing do to a negative number?",
        "transformers divided negative logits, so a penalty repeated what it should have avoided.",
        "huggingface/transformers/issues/2302",
    ),
    (
        SAMPLING, "distribution", "top-p leaves out the token that reaches it",
        "With top-p of 0.5 a token of 0.4 and one of 0.35 leave only the first.",
        "The set must reach p.",
        "llama.cpp's top-p stopped one token early.",
        "ggml-org/llama.cpp/pull/1953",
    ),
    (
        SAMPLING, "distribution", "temperature after the softmax",
        "A temperature has too small an effect.",
        "What does dividing all probabilities by the same number do, once they are normalized?",
        "gemma.cpp divided by the temperature after the exponential, which the normalization cancels.",
        "google/gemma.cpp/pull/981",
    ),
    (
        SAMPLING, "draw", "sum assumed to be 1",
        "Very rarely, the last token of the vocabulary is drawn.",
        "What does a float32 sum of 100,000 probabilities give?",
        "PsyNeuLink's choice failed where the sum of float probabilities ended just below 1.",
        "PrincetonUniversity/PsyNeuLink/pull/3535",
    ),
    (
        SAMPLING, "argmax", "last of several that are equal, between blocks",
        "Greedy texts differ between two programs, with the same logits.",
        "Which of two equal logits wins, and does the comparison between blocks agree?",
        "lattice's speculative decoding took the last of equal logits, its other paths the first.",
        "ohdearquant/lattice/issues/280",
    ),
    (
        SAMPLING, "route", "weights in the order of the experts",
        "A mixture of experts gives fluent nonsense.",
        "The weights and the indices are two lists. Are they in the same order?",
        "xberg's gate for DeepSeek-OCR took the indices for the weights.",
        "xberg-io/xberg/issues/1211",
    ),
]  # fmt: skip

EXERCISES = [
    Broken(number, chapter, op, mutant, title, hint, f"{seen} {GITHUB}{link}")
    for number, (chapter, op, mutant, title, hint, seen, link) in enumerate(_TABLE, 1)
]
