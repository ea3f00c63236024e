"""Names of the control tokens in conversations, for the models that we know."""

# The control tokens that end an answer, or the whole text. The first one that a model has is its eos_token where
# no file names one.
END_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|call|>", "<|end|>"),
    *("</s>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>"),
)
# Tokens that begin a message or its text. No person's text may hold them.
MARKERS = frozenset(
    {
        *END_OF_TURN,
        *("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|start|>", "<|message|>"),
        *("<|channel|>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_text|>", "<s>"),
    }
)
