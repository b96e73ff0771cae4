"""Pictures and sound: what a checkpoint's processor makes of them, and what a tower makes of that.

Nothing here knows a model. A processor follows the checkpoint's `preprocessor_config.json`. Pillow is imported with the
first picture.
"""

from .features import Features
from .picture import open_picture
from .processors import picture_processor

__all__ = ["Features", "open_picture", "picture_processor"]
