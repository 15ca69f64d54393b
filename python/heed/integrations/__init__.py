"""heed inside other libraries. Nothing here is imported or switched on by `import heed`:

    heed.integrations.transformers    attn_implementation="heed"
    heed.integrations.diffusers       an attention processor, and the attention backend "heed"
    heed.integrations.sdpa            torch.nn.attention.activate_flash_attention_impl("heed")

Each has a register(), and imports the library it is for only then.
"""
