"""Configuration: a typed schema, one loader for YAML and command line, and choices made per machine."""

from abcrown_dist.config.load import load_config
from abcrown_dist.config.schema import Config

__all__ = ["Config", "load_config"]
