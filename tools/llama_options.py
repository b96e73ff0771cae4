"""llama.cpp's command-line options that pyggml has under another name, does otherwise, or does not have."""

from __future__ import annotations

# What to do instead -> the options to which this applies.
_INSTEAD = {
    "pyggml computes on the CPU alone: leave it out": """
        -ngl --gpu-layers --n-gpu-layers -dev --device --list-devices -sm --split-mode -ts --tensor-split -mg --main-gpu
        -fit --fit -fitp --fit-print -fitt --fit-target -fitc --fit-ctx -kvo --kv-offload -nkvo --no-kv-offload
        --op-offload --no-op-offload --no-host -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn
        --n-cpu-ffn -bs --backend-sampling --mmproj-offload --no-mmproj-offload --spec-draft-ngl -ngld
        --gpu-layers-draft --n-gpu-layers-draft --spec-draft-device -devd --device-draft --spec-draft-override-tensor
        -otd --override-tensor-draft -mmdev --mmproj-device --spec-draft-cpu-moe -cmoed --cpu-moe-draft
        --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft
        --spec-draft-backend-sampling --no-spec-draft-backend-sampling""",
    "-m takes USER/REPO:PART, where PART is a part of the file's name": "-hff --hf-file",
    "a token is in HF_TOKEN, or in the file of `hf auth login`": "-hft --hf-token",
    "-m takes a URL": "-mu --model-url",
    "HF_HUB_OFFLINE=1 says so": "--offline",
    "`pyggml list` lists the models": "-cl --cache-list",
    "-m takes a repository of the Hugging Face Hub, as USER/REPO": """
        -dr --docker-repo --embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default
        --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default
        --vision-gemma-4b-default --vision-gemma-12b-default""",
    "-md takes USER/REPO:Q4_K_M, too": "--spec-draft-hf -hfd -hfrd --hf-repo-draft",
    "`pyggml chat` talks with a model": """
        -cnv --conversation -st --single-turn -i --interactive -if --interactive-first -mli --multiline-input
        --in-prefix --in-prefix-bos --in-suffix""",
    "`pyggml generate` continues a text and never chats: leave it out": "-no-cnv --no-conversation",
    "--help shows the options": "--usage",
    "--ram says how much memory the weights may take, and --mlock and --no-mmap how they are kept": """
        -lm --load-mode -lzm --lazy-mode""",
    "several machines share a model by `pyggml batch --ray`": "--rpc",
    "the threads place themselves; -t says how many there are": """
        -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch
        --cpu-strict-batch --prio-batch --poll-batch --spec-draft-threads -td --threads-draft
        --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft
        --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio
        --prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
        --spec-draft-cpu-range-batch -Crbd --cpu-range-batch-draft --spec-draft-cpu-strict-batch
        --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch
        --poll-batch-draft""",
    "drafts are made by -md, --lookup or --mtp, and --draft-max, --draft-min and --draft-p-min say how long": """
        --spec-type --dflash --eagle3 --draft --draft-n --draft-n-min -lcs --lookup-cache-static -lcd
        --lookup-cache-dynamic --spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split
        --spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft
        --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n
        --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m
        --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m
        --spec-ngram-map-k4v-min-hits --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-default""",
    "--samplers gives the order of the samplers, by their names": "--sampler-seq --sampling-seq",
    "chat templates are always Jinja: leave it out": "--jinja --no-jinja",
    "`pyggml serve` and `create_chat_completion` in Python read reasoning and tool calls": """
        --reasoning-format --reasoning-budget --reasoning-budget-message --reasoning-preserve --no-reasoning-preserve
        --skip-chat-parsing --no-skip-chat-parsing""",
    "`pyggml serve` goes on with messages that were begun": "--prefill-assistant --no-prefill-assistant",
    "`pyggml serve` has --reasoning-budget (0: none), and a chat may have a reasoning_effort": """
        -rea --reasoning --reasoning-effort""",
    "-v shows what is loaded and computed, and --log-file writes it to a file": """
        --log-verbose -lv --verbosity --log-verbosity --log-disable --log-jsonl --no-log-jsonl --log-prompts-dir
        --log-colors --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps""",
    "the time taken is always shown, on stderr": "--perf --no-perf --show-timings --no-show-timings",
    "`pyggml tokenize` shows the tokens of a text, and --json gives their ids": """
        --verbose-prompt --ids --show-count -ptc --print-token-count""",
    "-f - reads from stdin": "--stdin",
    "`pyggml info` checks a file": "--check-tensors --check",
    "--no-parse-special is how it is: leave it out": "--no-parse-special",
    "a context always has what its options need: leave it out": """
        --kv-unified-per-slot --swa-full -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -cram
        --cache-ram -kvu --kv-unified -no-kvu --no-kv-unified --cache-idle-slots --no-cache-idle-slots --warmup
        --no-warmup -dt --defrag-thold --attention --spm-infill""",
    "`pyggml batch` and `pyggml serve` answer many requests side by side: leave it out": """
        -ns --sequences -cb --cont-batching -nocb --no-cont-batching --context-file --chunk-size --chunk-separator
        --junk --pos""",
    "`pyggml bench` measures; its -p, -n and -r say what": "-pps -tgs -npp -ntg -npl",
    "the shell or its pipes do it: leave it out": "--completion-bash -co --color --simple-io -bf --binary-file",
    "`pyggml perplexity` has --hellaswag and --multiple-choice": "--winogrande --winogrande-tasks",
    "`pyggml perplexity` prints one form": "--ppl-output-type",
    "`pyggml embed` prints numbers, or JSON with --json, and takes a text for each line": """
        --embedding --embeddings --embd-output-format --embd-separator --cls-separator""",
    "`pyggml embed -q` scores texts by a reranker": "--rerank --reranking",
    "`pyggml cvector` has --method": "--pca-batch --pca-iter",
    "`pyggml trace` writes what a model computes": "--save-logits --logits-output-dir --tensor-filter",
    "--mmproj names a file; a folder has what sees or hears": """
        -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto""",
    "a tower computes as many tiles at a time as is fastest: leave it out": "--mtmd-batch-max-tokens",
    "pyggml reads no videos, and writes text alone": """
        --video --video-fps --video-timestamp-interval --video-ffmpeg-dir --tts-lang --tts-speaker-file""",
    "`pyggml serve` serves one model, or those of --models-dir and --models-preset": """
        --models-dir --models-preset --models-max --models-autoload --no-models-autoload --server-base --tags""",
    "`pyggml serve` has it": "--sleep-idle-seconds",
    "`pyggml serve` runs no tools: those of a request go to the client": """
        --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime
        --mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent""",
    "the page of `pyggml serve` is --ui or --no-ui, and --path replaces it": """
        --ui-config --webui-config --ui-config-file --webui-config-file --webui --no-webui""",
    "a slot keeps its last text, and cache_prompt of a request says whether that is used": """
        --cache-prompt --no-cache-prompt --cache-reuse -sps --slot-prompt-similarity""",
    "one event loop serves all connections of `pyggml serve`, and clients bring keys, no cookies: leave it out": """
        --threads-http --reuse-port --cors-credentials --no-cors-credentials""",
    "pyggml runs no diffusion models on its command line": """
        --diffusion-steps --diffusion-visual --diffusion-eps --diffusion-algorithm --diffusion-alg-temp
        --diffusion-block-length --diffusion-cfg-scale --diffusion-add-gumbel-noise""",
    "pyggml does not train models": """
        -lr --learning-rate -lr-min --learning-rate-min -decay-epochs --learning-rate-decay-epochs -wd --weight-decay
        -val-split --val-split -epochs --epochs -opt --optimizer""",
}
INSTEAD = {option: text for text, options in _INSTEAD.items() for option in options.split()}
