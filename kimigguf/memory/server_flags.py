"""The flags of llama-server, as ``llama-server --help`` of one build lists them: what it does not list, it refuses."""

from typing import Final

BUILD: Final = 11434

WITH_VALUE: Final = frozenset(
    """
    --adaptive-decay --adaptive-target --alias --api-key --api-key-file --api-prefix --batch-size --cache-ram
    --cache-reuse --cache-type-k --cache-type-k-draft --cache-type-v --cache-type-v-draft --chat-template
    --chat-template-file --chat-template-kwargs --checkpoint-min-step --control-vector --control-vector-scaled
    --cors-headers --cors-methods --cors-origins --cpu-mask --cpu-mask-batch --cpu-mask-batch-draft --cpu-mask-draft
    --cpu-range --cpu-range-batch --cpu-range-draft --cpu-strict --cpu-strict-batch --cpu-strict-batch-draft
    --cpu-strict-draft --ctx-checkpoints --ctx-size --defrag-thold --device --device-draft --docker-repo --draft
    --draft-max --draft-min --draft-n --draft-n-min --draft-p-min --draft-p-split --dry-allowed-length --dry-base
    --dry-multiplier --dry-penalty-last-n --dry-sequence-breaker --dynatemp-exp --dynatemp-range --embd-normalize
    --fit --fit-ctx --fit-target --flash-attn --frequency-penalty --gpu-layers --gpu-layers-draft --grammar
    --grammar-file --hf-file --hf-repo --hf-repo-draft --hf-token --host --image-max-tokens --image-min-tokens
    --json-schema --json-schema-file --keep --kv-unified-per-slot --lazy-mode --load-mode --log-colors --log-file
    --log-prompts-dir --log-verbosity --logit-bias --lookup-cache-dynamic --lookup-cache-static --lora --lora-scaled
    --main-gpu --mcp-servers-config --mcp-servers-json --media-path --min-p --mirostat --mirostat-ent --mirostat-lr
    --mmproj --mmproj-device --mmproj-url --model --model-draft --model-url --models-dir --models-max --models-preset
    --mtmd-batch-max-tokens --n-cpu-ffn --n-cpu-moe --n-cpu-moe-draft --n-gpu-layers --n-gpu-layers-draft --n-predict
    --numa --override-kv --override-tensor --override-tensor-draft --parallel --path --poll --poll-batch
    --poll-batch-draft --poll-draft --pooling --port --predict --presence-penalty --prio --prio-batch
    --prio-batch-draft --prio-draft --reasoning --reasoning-budget --reasoning-budget-message --reasoning-effort
    --reasoning-format --repeat-last-n --repeat-penalty --reverse-prompt --rope-freq-base --rope-freq-scale
    --rope-scale --rope-scaling --rpc --sampler-seq --samplers --sampling-seq --seed --sleep-idle-seconds
    --slot-prompt-similarity --slot-save-path --spec-draft-cpu-mask --spec-draft-cpu-mask-batch --spec-draft-cpu-range
    --spec-draft-cpu-strict --spec-draft-cpu-strict-batch --spec-draft-device --spec-draft-hf --spec-draft-model
    --spec-draft-n-cpu-moe --spec-draft-n-max --spec-draft-n-min --spec-draft-ncmoe --spec-draft-ngl
    --spec-draft-override-tensor --spec-draft-p-min --spec-draft-p-split --spec-draft-poll --spec-draft-poll-batch
    --spec-draft-prio --spec-draft-prio-batch --spec-draft-threads --spec-draft-threads-batch --spec-draft-type-k
    --spec-draft-type-v --spec-ngram-map-k-min-hits --spec-ngram-map-k-size-m --spec-ngram-map-k-size-n
    --spec-ngram-map-k4v-min-hits --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-size-n --spec-ngram-min-hits
    --spec-ngram-mod-n-match --spec-ngram-mod-n-max --spec-ngram-mod-n-min --spec-ngram-simple-min-hits
    --spec-ngram-simple-size-m --spec-ngram-simple-size-n --spec-ngram-size-m --spec-ngram-size-n --spec-synth-len
    --spec-synth-rates --spec-type --split-mode --sse-ping-interval --ssl-cert-file --ssl-key-file --swa-checkpoints
    --tags --temp --temperature --tensor-split --threads --threads-batch --threads-batch-draft --threads-draft
    --threads-http --timeout --tools --tools-runtime --top-k --top-n-sigma --top-nsigma --top-p --typical --typical-p
    --ubatch-size --ui-config --ui-config-file --verbosity --video-ffmpeg-dir --video-fps --video-timestamp-interval
    --webui-config --webui-config-file --xtc-probability --xtc-threshold --yarn-attn-factor --yarn-beta-fast
    --yarn-beta-slow --yarn-ext-factor --yarn-orig-ctx -C -Cb -Cbd -Cd -Cr -Crb -Crd -a -b -c -cms -cram -ctk -ctkd
    -ctv -ctvd -ctxcp -dev -devd -dr -dt -fa -fit -fitc -fitt -hf -hfd -hff -hfr -hfrd -hft -j -jf -l -lcd -lcs -lm
    -lv -lzm -m -md -mg -mm -mmdev -mmu -mu -n -ncffn -ncmoe -ncmoed -ngl -ngld -np -ot -otd -r -rea -s -sm -sps -t
    -tb -tbd -td -to -ts -ub
    """.split()  # noqa: SIM905 -- hundreds of flags read better as text than as lines of one each
)
"""Flags that take the word behind them."""

WITH_TWO_VALUES: Final = frozenset({"--control-vector-layer-range"})

BARE: Final = frozenset(
    """
    --agent --backend-sampling --cache-idle-slots --cache-list --cache-prompt --check-tensors --completion-bash
    --cont-batching --context-shift --cors-credentials --cpu-moe --cpu-moe-draft --embd-gemma-default --embedding
    --embeddings --escape --fim-qwen-1.5b-default --fim-qwen-14b-spec --fim-qwen-30b-default --fim-qwen-3b-default
    --fim-qwen-7b-default --fim-qwen-7b-spec --gpt-oss-120b-default --gpt-oss-20b-default --help --ignore-eos --jinja
    --kv-offload --kv-unified --list-devices --log-disable --log-jsonl --log-prefix --log-timestamps --log-verbose
    --lora-init-without-apply --metrics --mmproj-auto --mmproj-offload --models-autoload --no-agent
    --no-cache-idle-slots --no-cache-prompt --no-cont-batching --no-context-shift --no-cors-credentials --no-escape
    --no-host --no-jinja --no-kv-offload --no-kv-unified --no-log-jsonl --no-log-prefix --no-log-timestamps
    --no-mmproj --no-mmproj-auto --no-mmproj-offload --no-models-autoload --no-op-offload --no-perf
    --no-prefill-assistant --no-reasoning-preserve --no-repack --no-skip-chat-parsing --no-slots
    --no-spec-draft-backend-sampling --no-ui --no-ui-mcp-proxy --no-warmup --no-webui --no-webui-mcp-proxy --offline
    --op-offload --perf --prefill-assistant --props --reasoning-preserve --repack --rerank --reranking --reuse-port
    --skip-chat-parsing --slots --spec-default --spec-draft-backend-sampling --spec-draft-cpu-moe --special
    --spm-infill --swa-full --ui --ui-mcp-proxy --usage --verbose --version --vision-gemma-12b-default
    --vision-gemma-4b-default --warmup --webui --webui-mcp-proxy -ag -bs -cb -cl -cmoe -cmoed -e -h -kvo -kvu -nkvo
    -no-ag -no-kvu -nocb -nr -sp -v
    """.split()  # noqa: SIM905 -- hundreds of flags read better as text than as lines of one each
)
"""Flags that stand alone."""

OLDER: Final = frozenset({"--mlock", "--mmap", "--no-mmap"})
"""Bare flags of earlier builds, which stand in many command lines; ``--load-mode`` took their place."""

ALL: Final = WITH_VALUE | WITH_TWO_VALUES | BARE | OLDER
