"""llama-cli's options (those of llama-completion, too), as of llama-cpp-python 0.3.36: the same here, by another name,
or why not. And what the shared ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyggml.tools.cli import VERBS as ALL_VERBS
from pyggml.tools.cli import app, main
from pyggml.tools.llama_options import INSTEAD
from pyggml.tools.prompt_text import unescape

from ..tiny_model import WriteModel

SAME = """
--help --version --display-prompt --no-display-prompt -t --threads -tb --threads-batch -c --ctx-size -n --predict
--n-predict -b --batch-size -ub --ubatch-size --keep --context-shift --no-context-shift -fa --flash-attn -p --prompt
-sys --system-prompt -sysf --system-prompt-file -f --file -e --no-escape --prompt-cache --prompt-cache-all
--prompt-cache-ro -r --reverse-prompt -sp --special --samplers -s --seed --ignore-eos --temp --temperature --top-k
--top-p --min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n
--repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length
--dry-penalty-last-n --dry-sequence-breaker --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l
--logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file --rope-scaling --rope-scale
--rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow
--yarn-beta-fast -gan --grp-attn-n -gaw --grp-attn-w --repack --no-repack -nr -ctk --cache-type-k -ctv --cache-type-v
--override-kv --lora --lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range -m --model
--chat-template --log-file -v --verbose --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min --draft-p-min
--spec-draft-model -md --model-draft -mm --mmproj --image --audio --hf-repo --numa
"""
OTHER = {
    "--load-mode": ("--mmap", "--no-mmap", "--mlock"),
    "--chat-template-file": ("--chat-template",),  # takes a file, too
    "--spec-type": ("--model-draft", "--lookup"),
    "--log-verbose": ("--verbose",),
    "--verbosity": ("--verbose",),
    "--draft --draft-n --draft-max --draft-min --draft-n-min": ("--draft-max", "--draft-min"),  # removed in llama.cpp
}
VERBS = {  # what another verb does
    "--verbose-prompt": "tokenize",
    "--check-tensors": "info",
    "--conversation --no-conversation --interactive --interactive-first --single-turn": "chat",
}
WHY_NOT = {
    "the CPU is the only device": """--device --list-devices --n-gpu-layers --split-mode --tensor-split
        --main-gpu --fit --fit-target --fit-ctx --kv-offload --no-kv-offload
        --op-offload --no-op-offload --override-tensor --cpu-moe --n-cpu-moe
        --n-cpu-ffn --no-host --backend-sampling --rpc --spec-draft-device
        --spec-draft-ngl --spec-draft-override-tensor --spec-draft-cpu-moe
        --spec-draft-n-cpu-moe --spec-draft-backend-sampling""",
    "the pool places its threads itself": """--cpu-mask --cpu-range --cpu-strict --prio --poll --cpu-mask-batch
        --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch
        --spec-draft-threads --spec-draft-threads-batch --spec-draft-cpu-mask
        --spec-draft-cpu-range --spec-draft-cpu-strict --spec-draft-prio
        --spec-draft-poll --spec-draft-cpu-mask-batch
        --spec-draft-cpu-strict-batch --spec-draft-prio-batch
        --spec-draft-poll-batch""",
    "-m takes repositories and URLs, the environment says the rest": """--model-url --docker-repo --hf-file --hf-token
        --offline --cache-list --spec-draft-hf --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default
        --vision-gemma-12b-default""",
    "no video": """--mmproj-url --mmproj-auto --no-mmproj --mmproj-offload
        --mmproj-device --video --video-fps --video-timestamp-interval
        --video-ffmpeg-dir""",
    "of the server, or of slots that a server has": """--server-base --ctx-checkpoints --cache-ram --swa-full""",
    "the shell, or its pipes, does it": """--completion-bash --color --simple-io --output --binary-file
        --multiline-input --in-prefix --in-suffix --in-prefix-bos
        --print-token-count --log-disable --log-jsonl --log-prompts-dir
        --log-colors --log-prefix --log-timestamps --show-timings
        --no-show-timings --perf --no-perf""",
    "templates are Jinja, and show what they make": """--jinja --no-jinja --skip-chat-parsing --reasoning-format
        --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message
        --reasoning-preserve --chat-template-kwargs""",
    "loading reads the weights once, and a step is as fast the first time": "--warmup --no-warmup --lazy-mode",
    "one form of the order": "--sampler-seq --sampling-seq",
    "drafts come from a model or from the text": """--lookup-cache-static --lookup-cache-dynamic --spec-synth-len
        --spec-synth-rates --spec-draft-p-split --spec-draft-type-k
        --spec-draft-type-v --spec-ngram-mod-n-min --spec-ngram-mod-n-max
        --spec-ngram-mod-n-match --spec-ngram-simple-size-n
        --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
        --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m
        --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
        --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits
        --spec-default""",
}
DEFAULTS: dict[str, Any] = {  # llama.cpp's, by the name of the parameter; the others follow
    "temp": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typ_p": 1.0,
    "top_n_sigma": -1.0,
    "seed": None,
    "samplers": None,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "ignore_eos": False,
    "draft_max": 3,
    "draft_min": 0,
    "draft_p_min": 0.0,
    "keep": 0,
    "context_shift": False,
    "grp_attn_n": 1,
    "grp_attn_w": 512,
    "ubatch_size": 512,
    "cache_type_k": "f16",
    "cache_type_v": "f16",
    "mmap": True,
    "repack": True,
    "escape": True,
    "display_prompt": True,
    "special": False,
    "prompt_cache_all": False,
    "prompt_cache_ro": False,
}
DEFAULTS["samplers"] = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
OTHER_DEFAULTS = {  # and why
    "n_predict": 128,  # no end, there: a model that ends no text would fill the context it was trained with
    "ctx_size": None,  # as trained, there: here what the prompt and -n need
    "batch_size": None,  # 2048, there and here: but for verbs that look at all logits
    "flash_attn": "auto",  # where it is faster, there
}


def params(verb: str) -> dict[str, Any]:
    command = app.get_command(None, verb)
    assert command is not None
    return {p.name: p for p in command.params}


def flags(verb: str) -> set[str]:
    return {o for p in params(verb).values() for o in (*p.opts, *p.secondary_opts)}


def test_each_option_is_there_under_one_name_or_the_other() -> None:
    ours = flags("generate") | flags("chat") | {"--version", "--help"}
    assert not set(SAME.split()) - ours
    assert not {o for others in OTHER.values() for o in others} - ours
    assert set(VERBS.values()) <= set(ALL_VERBS)
    listed = [SAME, *OTHER, *VERBS, *WHY_NOT.values()]
    names = [o for text in listed for o in text.split()]
    twice = {o for o in names if names.count(o) > 1}
    assert twice <= {"--draft-p-min"}
    assert not ours & {o for text in (*VERBS, *WHY_NOT.values()) for o in text.split()}


def test_defaults_are_those_of_llama_cpp() -> None:
    generate = params("generate")
    assert {name: generate[name].default for name in DEFAULTS} == DEFAULTS
    assert {name: generate[name].default for name in OTHER_DEFAULTS} == OTHER_DEFAULTS


def run(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    assert e.value.code == code
    return capsys.readouterr()


def test_escapes() -> None:
    assert unescape(r"a\nb\t\"\'\\n\x41\xc3\xa9\q\x4\\") == "a\nb\t\"'\\nAé\\q\\x4\\"
    assert unescape("é\\n") == "é\n" and unescape("\\") == "\\"


def test_prompts_are_unescaped_unless_told_otherwise(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("generate", "-m", tiny, "-n", 2, "-t", 1, "--temp", 0, "-l", "123+100")
    assert run(capsys, *args, "-p", r"a\tb").out == "a\tbxx\n"
    assert run(capsys, *args, "-p", r"a\tb", "--no-escape").out == "a\\tbxx\n"
    assert run(capsys, *args, "-p", r"a\tb", "--no-display-prompt").out == "xx\n"
    (tmp_path / "p.txt").write_text(r"a\tb")
    assert run(capsys, *args, "-f", tmp_path / "p.txt").out == "a\\tbxx\n"  # a file is as it is
    assert run(capsys, *args, "-p", "a", "-n", 9, "-r", r"\x78xx").out == "a\n"


def test_context_options_change_the_context(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "-m", tiny, "-p", "Hello", "-n", 4, "-t", 1, "--temp", 0, "--ignore-eos", "--json")
    plain = json.loads(run(capsys, *args).out)["ids"]
    for same in (("-b", 2), ("-ub", 3, "-b", 4), ("-tb", 2), ("--no-mmap",), ("-nr",), ("-ctk", "F32", "-ctv", "f32")):
        assert json.loads(run(capsys, *args, *same).out)["ids"] == plain, same
    assert "f7" in run(capsys, *args, "-ctk", "f7", code=2).err
    done = run(
        capsys, *args, "--override-kv", "llama.rope.freq_base=float:500000,tokenizer.ggml.add_bos_token=bool:false"
    )
    assert json.loads(done.out)["prompt_ids"] != json.loads(run(capsys, *args).out)["prompt_ids"]
    assert "KEY=TYPE:VALUE" in run(capsys, *args, "--override-kv", "a=b", code=2).err
    assert "a str for a" in run(capsys, *args, "--override-kv", "llama.block_count=str:9", code=1).err


def test_rope_options_are_metadata(write_model: WriteModel, capsys: pytest.CaptureFixture[str]) -> None:
    """The same logits as a file that says so."""
    tiny = write_model()
    args = ("-p", "Hello there", "-n", 2, "-t", 1, "--temp", 0, "--n-probs", 3, "--json")
    asked = run(capsys, "generate", "-m", tiny, *args, "--rope-scaling", "linear", "--rope-freq-scale", 0.25)
    other = write_model(kv={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    said = run(capsys, "generate", "-m", other, *args)
    assert json.loads(asked.out)["probs"] == json.loads(said.out)["probs"]
    assert (
        json.loads(asked.out)["probs"] != json.loads(run(capsys, "generate", "-m", write_model(), *args).out)["probs"]
    )


def test_probabilities_and_control_tokens(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "-m", tiny, "-p", "H", "-n", 3, "-t", 1, "--temp", 0)
    got = json.loads(run(capsys, *args, "--n-probs", 2, "--json").out)
    assert [len(p["top_logprobs"]) for p in got["probs"]] == [2] * len(got["ids"])
    assert got["probs"][0]["id"] == got["ids"][0] and got["probs"][0]["logprob"] <= 0
    assert run(capsys, *args, "-l", "2+100").out == "H\n"
    assert run(capsys, *args, "-l", "2+100", "-sp").out == "H</s>\n"


def test_samplers_by_llama_cpps_other_names(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "-m", tiny, "-p", "H", "-n", 8, "-t", 1, "-s", 1, "--temp", 1.5, "--json")
    plain = run(capsys, *args, "--samplers", "top_k;typ_p;temperature")
    other = run(capsys, *args, "--samplers", "top-k;typical;temp")
    assert json.loads(plain.out)["ids"] == json.loads(other.out)["ids"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version").out.startswith("pyggml 0.")


def test_logging_is_silent_unless_asked_for(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    args = ("generate", "-m", tiny, "-p", "H", "-n", 1, "-t", 1)
    assert "print_info" not in run(capsys, *args).err
    shown = run(capsys, *args, "-v").err
    for line in ("llama_model_loader: - kv   0: ", "print_info: arch                  = llama", "llama_kv_cache: size"):
        assert line in shown
    assert "CPU compute buffer size" in shown and "- type     F32:" in shown
    log = tmp_path / "log.txt"
    assert "print_info" not in run(capsys, *args, "--log-file", log).err and "print_info" in log.read_text()
    assert "print_info" not in run(capsys, *args).err  # the next command does not inherit it


def test_each_option_of_llama_cpp_is_ours_or_says_what_to_do_instead() -> None:
    """All names of common/arg.cpp."""
    theirs = (Path(__file__).parent / "llama_cpp_options.txt").read_text().split()
    ours = set().union(*map(flags, ALL_VERBS)) | {"--version", "-h", "--help"}
    assert len(theirs) > 500 and not set(theirs) - ours - INSTEAD.keys()
    assert not INSTEAD.keys() - set(theirs)
    assert not INSTEAD.keys() & (flags("generate") | flags("chat"))


@pytest.mark.parametrize("verb", ["generate", "chat", "batch", "tokenize", ""])
def test_options_of_llama_cpp_are_refused_by_name(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, text in INSTEAD.items():
        if verb and option in flags(verb):
            continue
        got = run(capsys, *[verb] * bool(verb), option, "99", code=2)
        assert (
            got.out == ""
            and got.err == f"{f'pyggml {verb}'.strip()}: {option} is an option of llama.cpp. Here {text}\n"
        )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generate -hff file", "-hff is an option of llama.cpp"),
        ("generate -p -hf -ngl=99 -n 1", "-ngl is an option of llama.cpp"),
        ("-hf repo", "'-hf'; it is one of: pyggml generate, chat"),
        ("-m model.gguf -p Hello", "'-m'; it is one of: pyggml generate, chat"),
        ("chat -p Hello", "'-p'; it is one of: pyggml generate, tokenize"),
        ("generate -vh", "No such option"),
        ("generate -pHello", "No such option"),
        ("generate -tbb 4", "No such option"),
    ],
)
def test_an_option_is_one_word(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = run(capsys, *line.split(), code=2)
    assert got.out == "" and got.err.count("\n") == 1 and says in got.err


def test_numbers_may_follow_a_letter(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "-m", tiny, "-p", "-h", "-t1", "--temp=0", "-l", "123+100")
    assert run(capsys, *args, "-n3").out == "-hxxx\n"
    assert len(run(capsys, *args, "-n-1", "-c32", "-ctk=f32").out) > 20
