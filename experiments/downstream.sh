#!/usr/bin/env bash
# The tables mmlu, pubmed and mrpc at small scale on one GPU, for models of encyclopedia articles:
#   DATA=prepared/ TASKS=tasks/ OUT=runs/downstream experiments/downstream.sh
# DATA is a folder of `didi data prepare --length 256 --tokenizer bpe:8192`; TASKS holds mmlu/,
# pubmed.jsonl and mrpc/ (docs/tasks.md). What is finished stays: the same command goes on.
set -euo pipefail
: "${DATA:?}" "${TASKS:?}" "${OUT:=runs/downstream}" "${STEPS:=3000}" "${AT_ONCE:=6}"
DIDI="${DIDI:-didi}"
if [[ ! -f $OUT/teacher/model.safetensors ]]; then
  resume=()
  if [[ -d $OUT/teacher ]]; then resume=(--resume); fi
  $DIDI pretrain stories-teacher --set "data.source=$DATA" --set data.rows=stream \
    --set model.own_window=false --set "train.steps=$STEPS" --out "$OUT/teacher" "${resume[@]}"
fi
$DIDI reproduce pubmed,mmlu,mrpc --scale small --data "$DATA" --teacher "$OUT/teacher" \
  --tasks "$TASKS" --at-once "$AT_ONCE" --out "$OUT/tables"
