"""Pictures and sound: what a checkpoint's processor makes of them, and what a tower makes of that.

Nothing here knows a model. A processor follows the checkpoint's `preprocessor_config.json`.
"""

from .features import Features

__all__ = ["Features"]
