"""A tiny chat model on disk: random weights and a word-level tokenizer with a chat template."""

from pathlib import Path

from tiny import write_target

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|> system w6 <|im_end|> {% endif %}"
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def write_chat_model(folder: Path, seed: int = 0, vocab_size: int = 101, **overrides) -> Path:
    """A folder that serves as `target.path`; ids are <unk>, start, end, three roles, then words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_target(folder, seed, vocab_size=vocab_size, **overrides)
    names = ["<unk>", START, END, "system", "user", "assistant"]
    names += [f"w{i}" for i in range(len(names), vocab_size)]
    model = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(name, special=True) for name in (START, END)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token=START,
        eos_token=END,
        chat_template=TEMPLATE,
    ).save_pretrained(str(folder))
    return folder
