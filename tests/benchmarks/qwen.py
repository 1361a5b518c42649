"""A model's config.json, as its makers state it: https://huggingface.co/Qwen/Qwen2.5-3B/blob/main/config.json"""

QWEN25_3B = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
