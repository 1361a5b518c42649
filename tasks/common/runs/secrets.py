"""Replace secrets in recorded text: keys, tokens and passwords, recognised by name or form."""

import re

MASK = "***"
_NAME = (
    r"(?:[\w.-]*[_.-])?(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!image_)(?<!video_)"
    r"(?:api[_-]?key|access[_-]?key|private[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d|token|credentials?)"
)
_SECRET = re.compile(_NAME, re.IGNORECASE)
_QUOTED = r"[fbru]{0,2}(?:\"\"\"[^\"]{1,999}\"\"\"|'''[^']{1,999}'''|\"[^\"\n]+\"|'[^'\n]+')"
# The name, perhaps in os.environ[...] or with a type, then a value in quotes or up to a space. Not a call, another
# variable, a type, a comparison, a special token <...>, nothing, nor what follows `token:` or `secret:` in a sentence.
_ASSIGNED = re.compile(
    rf"(?<![\w.-])({_NAME}[\"']?\]?[ \t]*(?:(?::[ \t]{{0,3}}[\w.\[\] |]{{1,80}}?)?\??=(?!=)|:(?![-=+?]))[ \t]*"
    r"(?:\\\n[-+ \t]{0,80}|\([ \t]*(?=[\"']))?)"
    r"(?!(?:null|none|true|false|str|int|float|bool|bytes|list|dict)\b|f?([\"'])(?:\{[^{}\"']*\}|<[^\"']*>)\2)"
    r"(?!(?<=(?i:token|ecret): )[^\s\"',}\]]+[ \t]+[\w(])"
    rf"({_QUOTED}|[^\s\"'$(){{}}\[\],;&|]+(?=[\s\"',;}}\]&|]|$))",
    re.IGNORECASE | re.MULTILINE,
)
# Other forms; the first group is the text before the secret.
_FORMS = [
    # a variable of the environment: its value, or its default
    rf"(?i)(\benviron\[[\"'](?:{_NAME}|\w+_key)[\"']\]\s*=\s*){_QUOTED}",
    rf"(?i)(\b(?:setdefault|putenv|setenv|getenv|environ\.get|env\.get)\(\s*[\"'](?:{_NAME}|\w+_key)[\"']\s*,\s*"
    rf"(?:default\s*=\s*)?){_QUOTED}",
    rf"(?i)(\b(?:getenv|environ\.get)\(\s*[\"'](?:{_NAME}|\w+_key)[\"'][^()\n]{{0,80}}\)\s*or\s+){_QUOTED}",
    rf"(?i)(\bsetattr\([^(),\n]{{1,80}},\s*[\"'](?:{_NAME}|\w+_key)[\"']\s*,\s*){_QUOTED}",
    rf"(?i)(\b(?:save|set)(?:_\w{{1,40}})?_(?:token|password|api_key)\((?:\s*{_QUOTED}\s*,){{0,3}}\s*){_QUOTED}",
    rf"(?i)(\.login\(\s*{_QUOTED}\s*,\s*){_QUOTED}",
    rf"(BasicAuth\(\s*{_QUOTED}\s*,\s*){_QUOTED}",
    rf"(?i)((?<![\w.-]){_NAME}\s*=\s*(?:os\.)?getenv\(\s*[\"'][^\"'\n]{{1,80}}[\"']\s*,\s*"
    rf"(?:default\s*=\s*)?){_QUOTED}",
    rf"(?i)(\blogin\(\s*(?:\w+\s*=\s*)?){_QUOTED}",
    rf"(?i)(\bauth\s*=\s*\(\s*{_QUOTED}\s*,\s*){_QUOTED}",
    # names that mean a secret in capitals only: forward_pass is none
    rf"(\b[A-Z0-9_]*(?:PASSWORD|_PASS|_PWD|PASSPHRASE|ACCOUNT_KEY|KAGGLE_KEY)[\"']?\]?[ \t]*(?::=|[:=](?!=))[ \t]*)"
    rf"(?:{_QUOTED}|[^\s\"'$(){{}}\[\],;&|]+)",
    rf"(\b[A-Z0-9_]*_KEY[ \t]*=[ \t]*)(?=[\"'][^\"'\s]*\d)(?=[\"']\S{{12}}){_QUOTED}",
    r"(?i)((?:api_?keys|passwords|secrets)[\"']?\s{0,9}[:=]\s{0,9}[\[{])[^\]}]{1,999}",
    r"(?i)(\bpassphrase[\"']?\s*[:=]\s*)" + _QUOTED,
    r"(\bcurl\b[^\n|;]{0,300}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"'$]{1,100}:)[^\s\"'$]+",
    r"(\b(?:sshpass|docker login|podman login)\b[^\n|;]{0,200}?\s-p[ =]?)[^\s\"'$]+",
    r"(\bhooks\.slack\.com/services/|\bdiscord(?:app)?\.com/api/webhooks/)[\w/-]+",
    # ENV NAME value of a Dockerfile, setenv and set -x of other shells, NAME := value of make
    r"(?m)(^[+ -]?[ \t]*(?:ENV|setenv|set -x) [A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD)[ \t]+)[^\s\"'$]+",
    r"(?m)(^[+ -]?[ \t]*(?:export )?[A-Z0-9_]*(?:TOKEN|_KEY|SECRET|PASSWORD)[ \t]*:=[ \t]*)[^\s\"'$]+",
    r"(?i)(\b(?:wandb|hf auth|huggingface-cli) login (?:--[\w-]+[ =])?)(?!-)[^\s\"'$-][^\s\"'$]{7,}",
    r"(?i)(\bmachine[ \t]+\S+[ \t]+login[ \t]+\S+[ \t]+password[ \t]+)\S+",
    r"(?i)(--(?:[\w-]{0,40}-)?(?:api-?key|password|secret|token)\s+)(?!-|\w+=)[^\s\"'$]+",
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*f?[\"']?(?:bearer|basic|token)\s+)[^\s\"'{}$<]+",
    r"(?i)(\bbearer\s+)(?=[^\s\"']*\d)[\w.~+/=-]{8,}",
    r"(-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----)(?s:.+?)(?=-----END|\Z)",
    # tokens of Hugging Face, OpenAI and its like, GitHub, GitLab, Slack, AWS, Google, JSON Web Tokens
    r"(\b)(?:hf_|gh[pousr]_)[A-Za-z0-9]{30,}",
    r"(\b)(?:sk-(?=[\w-]{0,100}\d)|github_pat_|glpat-|xox[abprs]-)[\w-]{16,}",
    r"(\b)(?:AKIA[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,})",
]
_OTHERS = [re.compile(form) for form in _FORMS]
_IN_URL = re.compile(r"(\w://)[^/@\s\"']+@")


def masked(text: str) -> str:
    """``text`` without the values of secrets (``api_key=...``), without tokens, and without passwords in URLs."""
    text = _ASSIGNED.sub(rf"\g<1>{MASK}", text)
    for form in _OTHERS:
        text = form.sub(rf"\g<1>{MASK}", text)
    return _IN_URL.sub(rf"\g<1>{MASK}@", text)


def masked_values(value, name: str = ""):
    """``masked`` for a config of dicts and lists."""
    if isinstance(value, dict):
        return {key: masked_values(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [masked_values(each, name) for each in value]
    if isinstance(value, str):
        return MASK if value and _SECRET.fullmatch(name) else masked(value)
    return value
