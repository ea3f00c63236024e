"""Names of the control tokens that known models use in conversations."""

# The control tokens that end an answer or a whole text. If no file states eos_token, it is the first of these tokens
# that the model has.
END_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|call|>", "<|end|>"),
    *("</s>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>"),
)
# Tokens that begin a message or its text. A user's message must not be able to spell these tokens.
MARKERS = frozenset(
    {
        *END_OF_TURN,
        *("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|start|>", "<|message|>"),
        *("<|channel|>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_text|>", "<s>"),
    }
)
