"""What Hydra reads and merges to verl's config without any value of ours, once instead of for each composition.

Hundreds of tests compose. Of the half second that it takes, nine tenths give the same each time: the files' default
lists, their merge, and the grammar of overrides that are the same. Hydra still applies every override to a copy of its
own, strictly. `tests/test_verl_config.py` compares with a composition that reads everything.
"""

import copy
import functools
import os
import pickle

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

LOADER = config_loader_impl.ConfigLoaderImpl
ORIGINAL = [
    (OmegaConf, "load", staticmethod(OmegaConf.load)),
    (OverridesParser, "parse_rule", OverridesParser.parse_rule),
    (config_loader_impl, "create_defaults_list", config_loader_impl.create_defaults_list),
    (LOADER, "_compose_config_from_defaults_list", LOADER._compose_config_from_defaults_list),
]


def restore(patch: pytest.MonkeyPatch) -> None:
    """Let Hydra read everything again."""
    for owner, name, function in ORIGINAL:
        patch.setattr(owner, name, function)


def install(patch: pytest.MonkeyPatch) -> None:
    load_file, parse_rule, create_defaults_list, compose = (function for _, _, function in ORIGINAL)

    @functools.cache
    def parsed_file(path: str, changed: int):
        return load_file(path)

    def load(file):
        path = str(getattr(file, "name", file))
        return copy.deepcopy(parsed_file(path, os.stat(path).st_mtime_ns))

    rules, lists, merged = {}, {}, {}

    def parse(self, text: str, rule: str):
        if (text, rule) not in rules:
            rules[text, rule] = parse_rule(self, text, rule)
        return copy.copy(rules[text, rule])

    def defaults_list(repo, config_name, overrides_list, **options):
        own = Overrides(repo=repo, overrides_list=overrides_list)
        values = set(map(id, own.config_overrides))
        chosen = tuple(each.input_line for each in overrides_list if id(each) not in values)  # of whole files
        key = (config_name, chosen, tuple(each.path for each in repo.get_sources()), *options.items())
        if key not in lists:
            lists[key] = create_defaults_list(repo, config_name, overrides_list, **options)
        found = lists[key]
        return DefaultsList(found.defaults, found.defaults_tree, own.config_overrides, found.overrides)

    def merge(self, defaults, repo):
        if id(defaults) not in merged:  # those of ``lists``, which stay
            merged[id(defaults)] = pickle.dumps(compose(self, defaults, repo))
        return pickle.loads(merged[id(defaults)])

    for (owner, name, _), function in zip(ORIGINAL, (staticmethod(load), parse, defaults_list, merge), strict=True):
        patch.setattr(owner, name, function)
