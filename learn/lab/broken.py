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
        "NNlib.jl subtracted 0 instead of the maximum if the maximum was negative.",
        "FluxML/NNlib.jl/pull/43",
    ),
    (
        NORMS, "softmax", "sum not rescaled when the maximum rises",
        "Rows that rise from left to right sum to less than 1.",
        "The sum is relative to an old maximum. What must happen to the sum when the maximum rises?",
        "A FlashAttention example of TileLang lost the maximum of earlier blocks.",
        "tile-ai/tilelang/pull/1148",
    ),
    (
        NORMS, "softmax", "a row of -inf gives NaN",
        "One padded sequence turns a whole batch into NaN.",
        "Which weights should a row get if it may attend to nothing, and what is 0/0?",
        "burn's attention gave NaN for rows with a mask that hides every key.",
        "tracel-ai/burn/issues/4694",
    ),
    (
        NORMS, "softmax", "maximum of the last block for every block",
        "Rows of up to 16 scores are right, but longer rows rarely sum to 1.",
        "Which maximum is subtracted when the weights are written?",
        "FlashAttention's row maximum was wrong in a case that its users found.",
        "Dao-AILab/flash-attention/pull/2083",
    ),
    (
        NORMS, "rmsnorm", "eps outside the root",
        "Vectors of tiny numbers come out too small.",
        "Compare with the formula: is eps added before or after the root?",
        "TileLang's RMSNorm added epsilon outside the root.",
        "tile-ai/tilelang/pull/1243",
    ),
    (
        NORMS, "rmsnorm", "tail left out of the sum (Liger #519)",
        "Results are slightly too large if the width is not a multiple of 64.",
        "How many columns does the sum include if there are 100?",
        "Kernels of AITER are wrong for odd widths.",
        "ROCm/aiter/issues/5044",
    ),
    (
        NORMS, "rmsnorm", "rounded to bfloat16 before the weight",
        "Every result is off by up to half a percent.",
        "How many times is each number rounded before it is returned?",
        "Hugging Face's Llama rounds there on purpose, and Transformer Engine does not, so they need different "
            "contracts.",
        "NVIDIA/TransformerEngine/issues/1132",
    ),
    (
        NORMS, "logsumexp", "tail padded with zeros",
        "Rows of very negative scores give the logarithm of a small integer.",
        "What does a padded score of 0 add to the sum?",
        "verl's fused cross entropy counted exp(0) for every weight row that padded its last tile.",
        "verl-project/verl/pull/5349",
    ),
    (
        POSITIONS, "rope_halves", "pairs of neighbors",
        "The model writes nonsense, although all its tensors were loaded.",
        "RoPE has two layouts. Which features are rotated together, and where are the results stored?",
        "AiDotNet loaded Hugging Face's checkpoints with the layout of Meta's checkpoints.",
        "ooples/AiDotNet/pull/2074",
    ),
    (
        POSITIONS, "rope_halves", "positions from 0 in every chunk (tiny-llm #46)",
        "Prompts of one chunk get good answers, longer prompts do not.",
        "At which position does the second chunk of a prompt begin?",
        "tiny-llm counted positions wrongly after the first step with a cache.",
        "skyzh/tiny-llm/pull/46",
    ),
    (
        POSITIONS, "rope_halves", "second half from the first half's result",
        "Position 0 is right, and all other positions are wrong.",
        "A rotation needs both old numbers to compute each of the two new numbers.",
        "In FlagGems's in-place rotation, a warp may read numbers that another warp has already rotated.",
        "flagos-ai/FlagGems/issues/5142",
    ),
    (
        POSITIONS, "rope_halves", "position in bfloat16, where 257 is 256",
        "Texts are good up to 256 tokens, and make no sense after that.",
        "How many significant bits does a position of 1,000 need?",
        "candle built RoPE's tables for Qwen2 in bfloat16.",
        "huggingface/candle/pull/3520",
    ),
    (
        POSITIONS, "rope_halves", "turned the other way",
        "Scores depend on the distance of two tokens, with the opposite sign.",
        "On paper, rotate (1, 0) by a quarter turn. In which direction does the kernel rotate?",
        "nanochat rotates the other way and has to keep it, because its models were trained so; other checkpoints "
            "need the usual way.",
        "karpathy/nanochat/pull/489",
    ),
    (
        POSITIONS, "rope_interleaved", "result in halves",
        "Scores are right, but a KV cache from another program does not work.",
        "In which order are the results stored?",
        "vllm-metal concatenated two halves that it should have interleaved.",
        "vllm-project/vllm-metal/pull/44",
    ),
    (
        POSITIONS, "rope_halves", "scaled frequencies ignored",
        "A Llama 3.1 works in short chats, but forgets things in long chats.",
        "Which frequencies does the kernel use: the caller's, or its own?",
        "Ten models of mlx-vlm ignored the rope_scaling that their configurations declare.",
        "Blaizzy/mlx-vlm/pull/1710",
    ),
    (
        POSITIONS, "norm_qkv", "appended a row late",
        "The first generated token is right, but all later tokens are strange.",
        "Which row of the cache belongs to position 7?",
        "deepsparse put one token too many into a full cache.",
        "neuralmagic/deepsparse/pull/1447",
    ),
    (
        ATTENTION, "attention", "head h to key head h % kv_heads",
        "Models with as many key heads as query heads work, other models do not.",
        "Which of 8 query heads share key head 0 of 2 key heads?",
        "ONNX's Attention repeated key heads in the wrong order.",
        "onnx/onnx/pull/7274",
    ),
    (
        ATTENTION, "attention", "scores scaled by a width padded to 8",
        "Heads of width 64 are right; heads of width 20 attend too evenly.",
        "Scores are divided by the root of a number. Which number?",
        "An fp8 attention for image models in a fork of SGLang scaled by the padded width.",
        "bytedance-iaas/sglang/pull/485",
    ),
    (
        ATTENTION, "attention", "weighted sum not rescaled",
        "The result is right for up to one block of keys.",
        "Two sums are relative to the old maximum. Are both rescaled?",
        "The document that explains FlashMLA's kernel had the inverse of the rescaling factor.",
        "deepseek-ai/FlashMLA/pull/177",
    ),
    (
        ATTENTION, "attention", "mask multiplied in, so that hidden scores are 0",
        "The model attends a little to future tokens.",
        "What weight does a score of 0 get?",
        "Readers of BERT's code ask why the mask is added: a mask that is multiplied hides nothing.",
        "huggingface/transformers/issues/542",
    ),
    (
        ATTENTION, "attention_prefill", "offset of the first sequence for every sequence",
        "One sequence is right; in a batch, later ones attend to wrong tokens.",
        "Every sequence has its own length before this chunk.",
        "tt-xla gave every row of a batch the cached length of row 0.",
        "tenstorrent/tt-xla/pull/5817",
    ),
    (
        ATTENTION, "attention_prefill", "window one too large",
        "A sliding window includes one token more than the definition.",
        "Does a window of 3 count the query itself?",
        "transformers passed FlashAttention a window that was one too large.",
        "huggingface/transformers/issues/39408",
    ),
    (
        ATTENTION, "attention_decode", "longest length for every sequence",
        "The longest sequence of a batch is right; others see old values.",
        "How many keys does each sequence have?",
        "JAX's attention ignored the lengths of the keys if the lengths of the queries were not given.",
        "jax-ml/jax/issues/23349",
    ),
    (
        ATTENTION, "attention_decode", "totals of splits not rescaled",
        "If a long cache is read in several splits, weights do not sum to 1.",
        "A split's total is relative to its own maximum.",
        "FlashInfer's log-sum-exp was wrong if the keys were split.",
        "flashinfer-ai/flashinfer/pull/58",
    ),
    (
        ATTENTION, "attention_paged", "last page left out if it is full",
        "The text is strange whenever its length is a multiple of the page size.",
        "How many pages do 32 keys need, and how many do 33 keys need?",
        "A vLLM kernel read beyond the block table if the last block had few pages.",
        "vllm-project/flash-attention/pull/42",
    ),
    (
        ATTENTION, "attention_paged", "table of the first sequence for every sequence",
        "Two users see parts of each other's text.",
        "Which sequence's pages does each sequence read?",
        "Attention in accel ignored the page table of a prompt and read the wrong pages.",
        "golang-design/accel/issues/10",
    ),
    (
        QUANTIZERS, "quantize", "largest weight for largest magnitude",
        "Groups with one large negative weight are clipped.",
        "What is the scale of a group whose largest weight is 0.1 and whose smallest is -3?",
        "onediff computed a scale from the largest weight instead of the largest magnitude.",
        "siliconflow/onediff/issues/893",
    ),
    (
        QUANTIZERS, "quantize", "truncated for rounded",
        "The error is twice what the format promises, always towards zero.",
        "What does a cast to an integer do with 2.9?",
        "SGLang's JAX port cast to int8 without rounding, so half of all codes were one step too low.",
        "sgl-project/sglang-jax/pull/1598",
    ),
    (
        QUANTIZERS, "quantize", "fp8 not clipped",
        "The largest weight of a row becomes NaN.",
        "What does a cast to e4m3 give for a number just above 448?",
        "Casts to float8_e4m3fn give NaN beyond its range, which surprises users who expect saturation.",
        "jax-ml/ml_dtypes/issues/260",
    ),
    (
        QUANTIZERS, "pack", "sign runs into the other nibble",
        "A weight is wrong if it shares a byte with a negative weight.",
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
        "Only the first group of each row is right.",
        "Which scale belongs to which columns?",
        "If a row has one scale, a kernel of vLLM read scales at negative offsets after its first block.",
        "vllm-project/vllm/pull/37329",
    ),
    (
        QUANTIZERS, "gemv_quantized", "summed in int8",
        "Vectors of small numbers are right, but large results come out too small.",
        "How large can a sum of 64 products become, and does int8 have room for it?",
        "Triton's matmul returned int8 for a product of int8 matrices.",
        "triton-lang/triton/issues/2296",
    ),
    (
        QUANTIZERS, "ggml_decode", "neighbors share a byte",
        "All weights have the right values, but they are in the wrong order.",
        "Which two weights of a Q4_0 block share a byte?",
        "A converter of 1bit-MONSTER put neighboring weights into a byte; ggml puts weights i and i + 16 into a byte.",
        "1bit-MONSTER/1bit-MONSTER/pull/572",
    ),
    (
        SAMPLING, "distribution", "penalty always divides",
        "A repetition penalty makes some words more frequent.",
        "What does dividing do to a negative number?",
        "transformers divided negative logits, too, so the penalty made repetitions more likely.",
        "huggingface/transformers/issues/2302",
    ),
    (
        SAMPLING, "distribution", "top-p leaves out the token that reaches it",
        "With top-p 0.5, only one of two tokens (0.4 and 0.35) is kept.",
        "The kept tokens must have a total probability of at least p.",
        "llama.cpp's top-p stopped one token early.",
        "ggml-org/llama.cpp/pull/1953",
    ),
    (
        SAMPLING, "distribution", "temperature after the softmax",
        "The temperature has almost no effect.",
        "What happens if all probabilities are divided by the same number and then normalized?",
        "gemma.cpp divided by the temperature after the exponential, which the normalization cancels.",
        "google/gemma.cpp/pull/981",
    ),
    (
        SAMPLING, "draw", "sum assumed to be 1",
        "Very rarely, the last token of the vocabulary is drawn.",
        "Is a float32 sum of 100,000 probabilities exactly 1?",
        "PsyNeuLink's choice failed where the sum of float probabilities ended just below 1.",
        "PrincetonUniversity/PsyNeuLink/pull/3535",
    ),
    (
        SAMPLING, "argmax", "last of several that are equal, between blocks",
        "Two programs with the same logits write different greedy texts.",
        "Which of two equal logits wins, and does the comparison between blocks agree?",
        "lattice's speculative decoding took the last of equal logits, but its other paths took the first.",
        "ohdearquant/lattice/issues/280",
    ),
    (
        SAMPLING, "route", "weights in the order of the experts",
        "A mixture of experts writes fluent nonsense.",
        "The weights and the indices are two lists. Are they in the same order?",
        "xberg's gate for DeepSeek-OCR used the indices as the weights.",
        "xberg-io/xberg/issues/1211",
    ),
]  # fmt: skip

EXERCISES = [
    Broken(number, chapter, op, mutant, title, hint, f"{seen} {GITHUB}{link}")
    for number, (chapter, op, mutant, title, hint, seen, link) in enumerate(_TABLE, 1)
]
