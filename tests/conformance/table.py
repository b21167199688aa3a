"""Which layouts of Megatron are held against the reference on which models: data only."""

TABLE = {
    "TP2": ("llama", "qwen2"),
    "TP2+SP": ("qwen3", "qwen3-moe"),
    "PP2": ("llama", "qwen3-tied"),
    "PP2xVPP2": ("qwen2", "qwen3-moe-tied"),
    "CP2": ("llama", "qwen3"),
    "DP2+DO": ("qwen2", "qwen3-moe"),
    "EP2xDP2": ("qwen3-moe", "qwen3-moe-tied"),
    "TP2xETP2+SP": ("qwen3-moe", "qwen3-moe-tied"),
    "TP2xPP2": ("llama", "qwen3-tied"),
    "TP2xCP2+SP": ("qwen2", "qwen3"),
    "PP2xVPP2xDP2": ("llama", "qwen3"),
    "TP2xPP2xDP2+SP+DO": ("llama", "qwen2"),
    "TP2xEP2xDP2+SP": ("qwen3-moe", "qwen3-moe-tied"),
    "PP2xEP2xDP2+DO": ("qwen3-moe", "qwen3-moe-tied"),
}
"""Each layout on two models or more; each architecture in five layouts or more."""
CASES = [(layout, family) for layout, families in TABLE.items() for family in families]
