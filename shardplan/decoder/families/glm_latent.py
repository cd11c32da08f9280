"""GLM-4.7 Flash, with the layers of DeepSeek V3, and GLM-5, with those of DeepSeek V3.2; only sizes differ.

Source: modelling code of transformers.
"""

from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import ExpertDefaults
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.indexer_keys import INDEXER_TENSORS, read_indexer
from shardplan.decoder.families.common.latent_keys import LatentSizes
from shardplan.decoder.families.deepseek import layer_rules, read_with_sigmoid

FLASH = ExpertDefaults(experts=64, per_token=4, size=1536, shared=1, scale=1.8)
FLASH_SIZES = LatentSizes(query_rank=768, kv_rank=512, unrotated=192, rotated=64, value=256)
GLM_5 = ExpertDefaults(experts=256, per_token=8, size=2048, shared=1, scale=2.5)
GLM_5_SIZES = LatentSizes(query_rank=2048, kv_rank=512, unrotated=192, rotated=64, value=256)


def read_flash(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of GLM-4.7 Flash.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_flash(ConfigKeys(read_config("glm-4.7-flash", None), "config.json"))
    >>> attention = fields["segments"][0].layers[0].attention
    >>> attention.rotated_size, attention.unrotated_size, attention.value_size
    (64, 192, 256)
    """
    return read_with_sigmoid(keys, FLASH_SIZES, FLASH, first=1, positions=202752, epsilon=1e-5)


def read_glm_5(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of GLM-5.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_glm_5(ConfigKeys(read_config("glm-5", None), "config.json"))
    >>> [(segment.repeats, type(segment.layers[0].mlp).__name__) for segment in fields["segments"]]
    [(3, 'MlpConfig'), (75, 'ExpertsConfig')]
    """
    fields = read_with_sigmoid(keys, GLM_5_SIZES, GLM_5, first=3, positions=202752, epsilon=1e-5)
    return read_indexer(keys, fields)


GLM4_MOE_LITE = Family(read_flash, layer_rules)
GLM_MOE_DSA = Family(read_glm_5, layer_rules, dispensable=INDEXER_TENSORS)
