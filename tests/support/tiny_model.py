"""A random model of a few thousand parameters, as the convert stage makes it."""

from workflow.campaign.schema import DataConfig, ModelConfig

ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "initializer_range": 0.2,
}  # fmt: skip
TINY = ModelConfig(name="tiny", architecture=ARCHITECTURE, tokenizer={"vocab_size": 96})
DATA = DataConfig(name="sorting", tasks=[{"name": "number_sorting"}], train_size=32, heldout_size=4)
