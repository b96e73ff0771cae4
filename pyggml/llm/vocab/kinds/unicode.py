"""Unicode 15, the version of llama.cpp's tables. Characters assigned by later versions count as unassigned."""

from __future__ import annotations

# Ranges for a character class. They include characters that no version has assigned.
NEWER = (
    r"\u0558\u058b-\u058c\u05c8-\u05c9\u088f\u0897"
    r"\u0b53-\u0b54\u0c5c\u0cdc\u1acf-\u1af0\u1b4e-\u1b4f"
    r"\u1b7f\u1c89-\u1c8a\u208f\u209d-\u209f\u20c1-\u20c4"
    r"\u2427-\u2429\u2b96\u2e60-\u2e63\u31e4-\u31e5\ua7cb-\ua7cf"
    r"\ua7d2\ua7d4\ua7da-\ua7f1\uab6c-\uab6d\ufbc3-\ufbd2"
    r"\ufd90-\ufd91\ufdc8-\ufdce\U000105c0-\U000105f3\U000107bb-\U000107bf\U00010940-\U00010959"
    r"\U00010d40-\U00010d8f\U00010ec2-\U00010efc\U00011380-\U000113e2\U000116d0-\U000116e3\U00011b0a-\U00011bf9"
    r"\U00011db0-\U00011df1\U00011f5a\U0001246f\U00012475-\U0001247f\U00012550-\U00012686"
    r"\U00013460-\U000143fa\U00016100-\U00016139\U00016d40-\U00016d79\U00016ea0-\U00016ed3\U00016ff2-\U00016ff6"
    r"\U000187f8-\U000187ff\U00018cd6-\U00018cff\U00018d09-\U000191d2\U0001b123-\U0001b128\U0001b168"
    r"\U0001cc00-\U0001cefd\U0001d127-\U0001d128\U0001d1eb-\U0001d1ff\U0001d250-\U0001d281\U0001d6a6"
    r"\U0001db00-\U0001db1c\U0001df1f-\U0001df24\U0001df2b-\U0001dfff\U0001e5d0-\U0001e6ff\U0001f1ae"
    r"\U0001f6d8-\U0001f6d9\U0001f777-\U0001f77a\U0001f7da-\U0001f7db\U0001f7f1-\U0001f7ff\U0001f8b2-\U0001f8d8"
    r"\U0001fa54-\U0001fa57\U0001fa89-\U0001fa8f\U0001fabe\U0001fac6-\U0001facd\U0001fadc-\U0001fadf"
    r"\U0001fae9-\U0001faef\U0001faf9-\U0001fafa\U0001fbcb-\U0001fbef\U0001fbfa\U0002b73a-\U0002b73f"
    r"\U0002b81e\U0002cea2-\U0002cead\U000323b0-\U0003fc3f"
)
