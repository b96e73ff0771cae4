"""What a file, a request or a text from a stranger may cost: every such limit of pyggml, in one table.

Small input must not be able to take hours or gigabytes. Each limit is far above what real models and requests need, and
whatever goes beyond one raises an exception that names it. Readers look a limit up when they need it, so a program may
raise one: `pyggml.limits.JSON_BYTES = 1 << 30`. `docs/limits.md` shows the table to users.
"""

from __future__ import annotations

# Files beside the weights
JSON_BYTES = 1 << 28  # size of a JSON file: config.json, tokenizer.json, the index of shards (largest known: 35 MB)
TOKENIZER_TOKENS = 1 << 21  # tokens of a folder's tokenizer: ids are below it (the largest known has 0.9 million)
SENTENCEPIECE_BYTES = 1 << 24  # size of a tokenizer.model (the largest known has 5 MB)
HEAD_DIM = 1 << 16  # elements of a head of attention, as a config has it (the largest known has 576)
TEXT_FILE_BYTES = 1 << 24  # size of a file with a chat template or a grammar
PATTERN_CHARS = 1 << 16  # length of a pattern of a PEFT adapter
PATTERN_SECONDS = 5  # for matching all `rank_pattern` and `alpha_pattern` of a PEFT adapter: each takes microseconds
TRACE_BYTES = 1 << 30  # size to which a trace (.npz) may unpack, however small its file is ...
TRACE_RATIO = 16  # ... and how many times as large as its file: numbers rarely shrink to half when packed

# Pictures and sound. Pillow warns from this number on, too
PICTURE_PIXELS = (1 << 30) // 12  # pixels of a picture (89 million), and of all that a processor makes of it
PICTURE_TILES = 1 << 10  # tiles that a processor cuts a picture into (the largest known number is 145)
PICTURE_PAIRS = 1 << 32  # pairs of patches in the tiles of a picture, which attention compares (65,536 patches in one)
PICTURE_SCANS = 1 << 7  # times that a JPEG file goes over its pixels (progressive ones have 10)
SOUND_SECONDS = 6 * 3600  # length of a sound (1.4 GB as samples at 16 kHz)
SOUND_SAMPLES = 1 << 32  # samples of all channels of a file, at its own rate (6 hours of stereo at 96 kHz)

# Chat templates. Besides, a template may use TEMPLATE_PER_BYTE steps and bytes for each byte of its variables
TEMPLATE_SOURCE = 1 << 17  # characters of a template (the largest known has 30,000)
TEMPLATE_STEPS = 1 << 24  # nodes of the template that are run, and values that are written or compared
TEMPLATE_BYTES = 1 << 26  # bytes of all texts and lists that it makes, its output among them
TEMPLATE_PER_BYTE = 64
TEMPLATE_SECONDS = 60.0  # time of one rendering

# Vocabularies
TOKEN_BYTES = 1 << 12  # length of a token that is looked for at each place, as special ones are (longest known: 128)
CHARSMAP_BYTES = 1 << 8  # that a rule of a character map replaces or puts in (the longest known puts in 33)

# Grammars and JSON schemas
GRAMMAR_STEPS = 4_000_000  # steps of analysing a GBNF grammar, mostly pairs of characters that are compared
GRAMMAR_ITEMS = 50_000  # states of the parser in one step of a text; 5,000 members that may all be missing need 20,000
SCHEMA_PARTS = 200_000  # schemas inside one, with the copies that are made of definitions which are merged with others
SCHEMA_MEMBERS = 1 << 21  # members that it lists, each twice for each schema around it, plus one for each schema
SCHEMA_OBJECT = 1 << 11  # members of one object in it: for each the engine goes one level deeper on its stack
SCHEMA_REMAINDERS = 1 << 18  # sum of its `multipleOf` (without zeros at the end): the engine has a state for each
SCHEMA_SECONDS = 5  # that the engine may look at the patterns of one schema

# Sampling
SAMPLERS = 64  # in a chain: each looks at the whole vocabulary for each token
BREAKERS = 1 << 8  # sequence breakers of DRY: each is looked for in the whole vocabulary

# Requests to the server
REQUEST_BYTES = 1 << 24  # size of a request's body
REQUEST_PARTS = 1 << 20  # brackets and colons in a body, which begin lists, objects and values of members
REQUEST_PROBS = 1 << 20  # log-probabilities in one answer: texts times tokens times `n_probs` (half a GB)
REQUEST_NUMBERS = 1 << 24  # numbers of all vectors of one answer (2,048 texts of 8,192 numbers, or tokens)
REQUEST_TEXTS = 1 << 11  # answers that one request asks for: prompts times `n`, or texts to embed
BIASED_TEXTS = 1 << 12  # texts in `logit_bias`, each of which is tokenized
REQUEST_MEDIA = 1 << 8  # pictures and sounds in one request
RESPONSE_FIELDS = 1 << 8  # members that `response_fields` asks for
MEDIA_BYTES = 1 << 26  # size of a picture that the server fetches, and of a form with a sound
SPEECH_PROMPT = 1 << 16  # bytes of the prompt of a transcription, of which the last few hundred tokens are read
BATCH_BYTES = 1 << 28  # size of a file of requests (/v1/files)
BATCH_ABOUT = 1 << 14  # bytes of what lists show of each file and batch: a purpose, metadata
BODIES_BYTES = 1 << 29  # of the bodies of all requests together that have not come whole
PREPARED_BYTES = 1 << 24  # of the bodies of requests whose texts are made tokens at the same time; others wait ...
WAITING_BYTES = 1 << 27  # ... and more than so many bytes of them are refused
ACTIVATION_TOKENS = 1 << 10  # length of a prompt whose nodes are asked for
ACTIVATION_BYTES = 1 << 28  # size of what its nodes give
ACTIVATION_NAMES = 1 << 8  # names and patterns of nodes in one request, and edits; and the characters of each
ACTIVATION_EDITED = 1 << 32  # bytes of nodes that the edits of a request change
CONNECTIONS = 1 << 10  # at once; fewer when fewer files may be open (ulimit -n)
HEADERS = 1 << 8  # of a request
HEADER_SECONDS = 30  # in which the headers of a request must have come ...
BODY_SECONDS = 30  # ... and its body, with a second more ...
BODY_RATE = 1 << 12  # ... for each so many bytes of it that have come
CHUNKS = 1 << 12  # chunks of a body, which may be of any size; more of them must have ...
CHUNK_BYTES = 1 << 6  # ... so many bytes on average
