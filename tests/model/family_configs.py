"""The fixtures' configs with keys changed, and what a family makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from coli.errors import ColiError
from coli.model.config import ModelSpec
from coli.model.families import spec_from_config

ORACLE = Path(__file__).parent.parent / "oracle"
FIXTURE = {
    "glm_moe_dsa": "glm_moe_dsa-sparse",
    "deepseek_v2": "deepseek_v2-lite-group",
    "deepseek_v3": "deepseek_v3-yarn",
    "glm4_moe": "glm4_moe-base",
    "ernie4_5_moe": "ernie4_5_moe-base",
    "gpt_oss": "gpt_oss-base",
    "granitemoe": "granitemoe-base",
    "llama": "llama-bias-sharded",
    "mixtral": "mixtral-base",
    "olmoe": "olmoe-base",
    "phimoe": "phimoe-longrope",
    "qwen2_moe": "qwen2_moe-sparse-step",
    "qwen3": "qwen3-base",
    "qwen3_moe": "qwen3_moe-padvocab",
}
PATH = Path("model/config.json")


def config(family: str, **changes: Any) -> dict[str, Any]:
    """The fixture's config with keys changed; ... removes one."""
    values = json.loads((ORACLE / FIXTURE[family] / "config.json").read_text()) | changes
    return {key: value for key, value in values.items() if value is not ...}


def spec(family: str, **changes: Any) -> ModelSpec:
    return spec_from_config(config(family, **changes), PATH)


def refusal(kind: type[ColiError], family: str, **changes: Any) -> str:
    with pytest.raises(kind) as raised:
        spec(family, **changes)
    text = str(raised.value)
    assert "\n" not in text
    assert "model/config.json" in text
    return text
