#!/usr/bin/env bash
# The models and tables of docs/results.md, stage by stage, on one GPU:
#   DATA=prepared/ SOURCE=stories15m/ OUT=runs/stories experiments/stories.sh teacher
# DATA is a folder of `didi data prepare --rows document --length 256 --tokenizer bpe:4096`, SOURCE
# the causal LM whose stories they are, REAL a text with a real story on each line.
# STEPS=4,8 are the budgets to look at, WITH="--temperature 1.05" are further options of `didi eval`,
# NAME=warm names the numbers (warm.json), BASE=teacher-streams is what `compare` compares with.
# FEW=1 makes everything tiny, to see that it runs.
set -euo pipefail
: "${DATA:?}" "${OUT:=runs/stories}" "${SEED:=0}"
DIDI="${DIDI:-didi}"
data=(--set "data.source=$DATA")
shape=() tiny=() num=1024 steps="${STEPS:-2,4,8,16,32,64,128}" most=256
if [[ -n "${FEW:-}" ]]; then
  tiny=(--set train.steps=4 --set train.batch_size=16 --set train.eval_sequences=8)
  shape=(--set model.layers=1 --set model.hidden=32 --set model.heads=2 "${tiny[@]}")
  tiny+=(--set watch.samples=8 --set reference.rows=64 --set reference.steps=4
    --set token_matching.warmup=1 --set discriminator.warmup=1)
  num=64 steps=4 most=8
fi
name="${NAME:-$1}"
read -ra with <<<"${WITH:-}"
judge=(--judge "${SOURCE:-}" --judge-temperature 0.8 --judge-collapse-spaces --judge-end "<s>" --judge-beyond uniform)

pretrain() { $DIDI pretrain "$1" "${data[@]}" "${shape[@]}" "${@:3}" --out "$OUT/$2"; }
distil() { # recipe, name, teacher
  $DIDI distill "$1" --teacher "$OUT/$3" "${data[@]}" "${tiny[@]}" "${@:4}" --set "train.seed=$SEED" --out "$OUT/$2"
}
case "$1" in
  teacher) pretrain stories-teacher teacher "${@:2}" ;;
  teacher30)
    pretrain stories-teacher teacher30 --set model.layers=8 --set model.hidden=512 --set model.heads=8 "${@:2}" ;;
  ar) pretrain stories-ar ar "${@:2}" ;;
  path) # likelihood along the student's own paths
    distil stories-path "path-$SEED" teacher "${@:2}" ;;
  matching) # token-level matching from there; AS=weak names another student of the same kind
    distil stories-token-matching "${AS:-matching}-$SEED" "path-$SEED" "${@:2}" ;;
  didi) distil stories-didi "didi-$SEED" teacher "${@:2}" ;;
  streams) # the teacher again, sampled in another order
    cp -r "$OUT/teacher" "$OUT/teacher-streams"
    sed -i 's/"order": "random"/"order": "streams"/' "$OUT/teacher-streams/config.json" ;;
  likelihood)
    for model in "${@:2}"; do
      $DIDI eval "$OUT/$model" --metrics nelbo --data "$DATA" --sequences $((num * 4)) --batch-size 256 --json "$OUT/nelbo-$model.json"
    done ;;
  compare | plain | guided | alone | confirm | mauve)
    sources=() && for model in "${@:2}"; do sources+=("$OUT/$model"); done
    variety=ppl,entropy,unique-4gram,self-bleu
    case "$1" in
      compare) # students beside the teacher, each at its best temperature and top-p
        with+=(--frontier --against "$OUT/${BASE:-teacher}" --most-steps "$most" --metrics $variety,path-kl) ;;
      plain) # the same at T 1
        with+=(--against "$OUT/teacher" --most-steps "$most" --metrics $variety,path-kl) ;;
      alone) with+=(--metrics $variety,path-kl) ;;
      guided) # WITH="--option candidates=1 --option split=1": tilting alone
        with+=(--sampler rgas --metrics $variety) ;;
      confirm) # by a fresh network that tells samples from stories, and one that learns the samples
        with+=(--metrics ppl,entropy,path-kl,c2st,ar-kl --ar-start "$OUT/ar" --reference "$DATA") ;;
      mauve) with+=(--metrics ppl,entropy,mauve --reference "${REAL:-$DATA}" --documents line) ;;
    esac
    $DIDI eval "${sources[@]}" --steps "$steps" --num "$num" "${with[@]}" "${judge[@]}" --batch-size 512 \
      --out "$OUT/evals/$name" --json "$OUT/$name.json" ;;
  *) echo "unknown stage $1" >&2; exit 2 ;;
esac
