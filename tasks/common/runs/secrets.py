"""Replace secrets in recorded text: keys, tokens and passwords, recognised by name or form.

Rather too much than too little: a line of code loses its quoted texts after the name of a secret.
"""

import re

MASK = "***"
# A tokenizer's special tokens, pad_token and its like, are no secrets.
_SPECIAL = "".join(f"(?<!{name}_)" for name in ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "video"))
_NAME = (
    rf"(?:(?:[\w.-]*[_.-])?{_SPECIAL}(?:(?:api|access|private|account)[_-]?keys?|secret(?:[_-]?key)?s?|passw(?:or)?ds?"
    r"|passphrase|token|credentials?)|(?-i:[A-Z0-9_]*(?:_KEYS?|_PASS|_PWD|PASSWORD)))"
)
_SECRET = re.compile(_NAME, re.IGNORECASE)
_TEXT = re.compile(r"\"\"\"[^\"]*\"\"\"|'''[^']*'''|\"[^\"\n]*\"|'[^'\n]*'")
# The rest of the line, and the next one where the line goes on, after what is named like a secret or takes one.
_AFTER = re.compile(
    rf"((?<![\w.-]){_NAME}[\"']?(?![\w.-])|\b(?:\w*login|auth|\w*BasicAuth|\w*_(?:token|password|api_key))\b)"
    r"((?:[\\(\[{][ \t]*\n|\"\"\"[^\"]*\"\"\"|'''[^']*'''|[^\n])+)",
    re.IGNORECASE,
)
# A value without quotes: not a call, another variable, a type, a comparison.
_BARE = (
    r"(?!(?:null|none|true|false|str|int|float|bool|bytes|list|dict)\b)[^\s\"'$(){}\[\],;&|<*=]+(?=[\s\"',;}\]&|]|$)"
)
# The first group of each is the text before the secret.
_FORMS = [
    rf"(?im)((?<![\w.-]){_NAME}[\"']?\]?[ \t]*(?::=|\?=|=(?!=)|:(?!=))[ \t]*){_BARE}",
    rf"(?im)((?<![\w.-])(?:--|(?-i:(?=[A-Z0-9_]+\s))){_NAME}[ \t]+)(?!-|\w+=){_BARE}",
    r"(?i)(\bmachine[ \t][^\n]{0,200}?\bpassword[ \t]+)\S+",
    r"(?i)(\b(?:wandb|hf auth|huggingface-cli) login (?:--[\w-]+[ =])?)[^\s\"'$-][^\s\"'$]{7,}",
    r"(\bcurl\b[^\n|;]{0,300}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"'$]+:)[^\s\"'$]+",
    r"(\b(?:sshpass|docker login|podman login)\b[^\n|;]{0,200}?\s-p[ =]?)[^\s\"'$]+",
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*f?[\"']?(?:bearer|basic|token)\s+)[^\s\"'{}$<]+",
    r"(?i)(\bbearer\s+)(?=[^\s\"']*\d)[\w.~+/=-]{8,}",
    r"(\bhooks\.slack\.com/services/|\bdiscord(?:app)?\.com/api/webhooks/)[\w/-]+",
    r"(-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----)(?s:.+?)(?=-----END|\Z)",
    # tokens of Hugging Face, OpenAI and its like, GitHub, GitLab, Slack, AWS, Google, JSON Web Tokens
    r"(\b)(?:hf_|gh[pousr]_)[A-Za-z0-9]{30,}",
    r"(\b)(?:sk-(?=[\w-]{0,100}\d)|github_pat_|glpat-|xox[abprs]-)[\w-]{16,}",
    r"(\b)(?:AKIA[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,})",
    r"(\w://)[^/@\s\"']+(?=@)",
]
_OTHERS = [re.compile(form) for form in _FORMS]


def masked(text: str) -> str:
    """``text`` without the values of secrets (``api_key=...``), without tokens, and without passwords in URLs."""
    text = _AFTER.sub(lambda found: found[1] + _TEXT.sub(MASK, found[2]), text)
    for form in _OTHERS:
        text = form.sub(rf"\g<1>{MASK}", text)
    return text


def masked_values(value, name: str = ""):
    """``masked`` for a config of dicts and lists."""
    if isinstance(value, dict):
        return {key: masked_values(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [masked_values(each, name) for each in value]
    if isinstance(value, str):
        return MASK if value and _SECRET.fullmatch(name) else masked(value)
    return value
