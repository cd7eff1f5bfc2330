#!/usr/bin/env bash
# The table of baselines on stories, on one GPU, in stages that each leave something to keep:
#   DATA=prepared/ SOURCE=stories15m/ OUT=runs/rivals MINUTES=0.6 experiments/rivals.sh compile first second
# DATA is a folder of `didi data prepare --rows document --length 256` with the tokenizer of
# `stories/teacher`, SOURCE the causal LM whose stories they are.
#   compile  kernels of the trainings that the table waits for, beside each other, so that none of
#            them waits later; meanwhile the GPU, which has little to do, draws what the teacher writes
#   first    all rivals but DUO, or those in ALONE=sdtt,dimo: trained, drawn, in a table
#   second   DUO, whose teacher takes as long as all of the others, and the table of all
#   settings other settings of training (rival_settings.py), or TRY="--roles duo --most 2"
# FROM=experiments/kept/stories-baselines.tar.xz: results of an earlier run with its paces
# (kept_results.py), from which this one goes on.
# KEEP=folder: tables, results, logs and recipes, without weights, are packed there every minute and
# after each stage: unpacked into an OUT elsewhere, what is done stays done.
# MAUVE=no, where mauve-text is missing. SCALE=toy needs neither data nor judge, to see that it runs.
set -euo pipefail
: "${OUT:?}" "${SCALE:=small}" "${MINUTES:=0.6}" "${SEEDS:=1}" "${AT_ONCE:=6}"
here="$(cd "$(dirname "$0")" && pwd)"
PYTHON="${PYTHON:-python3}"
given=(--scale "$SCALE" --out "$OUT" --minutes "$MINUTES" --seeds "$SEEDS")
judging=() others=(ar sdtt dimo jump token-matching)
if [[ "$SCALE" == small ]]; then
  : "${DATA:?}" "${SOURCE:?}"
  given+=(--data "$DATA" --judge "$SOURCE")
  judging=(--judge-temperature 0.8 --judge-collapse-spaces --judge-end "<s>" --judge-beyond uniform
    --at-once "$AT_ONCE")
  others+=(path)
fi
[[ -z "${ALONE:-}" ]] || IFS=, read -ra others <<<"$ALONE"
[[ "${MAUVE:-}" != no ]] || given+=(--no-mauve)

table() { "$PYTHON" -m didi_instruct reproduce baselines "${given[@]}" "${judging[@]}" "$@"; }
train() { "$PYTHON" "$here/rivals.py" train "${given[@]}" "$@"; }
draw() { OMP_NUM_THREADS=3 "$PYTHON" "$here/rivals.py" draw "${given[@]}" --at-once "$AT_ONCE" "$@"; }
keep() { # results and tables as they lie in OUT, logs apart: a folder with a log is a run to go on with
  [[ -n "${KEEP:-}" && -d "$OUT" ]] || return 0
  mkdir -p "$KEEP"
  local new status=0
  new="$(mktemp "$KEEP/.newXXXX")"
  (cd "$OUT" && find . \( -path './tables/*' -o -name done.json -o -name log.jsonl -o -name recipe.yaml \
    -o -name paces.json -o -name 'settings*.json' \) -print |
    tar --transform='s,^\./jobs/\(.*\)/run/,./logs/\1/,' -czf - -T -) >"$new" || status=$?
  # 1: a log has grown meanwhile
  if ((status < 2)); then mv "$new" "$KEEP/kept.tar.gz"; else rm -f "$new"; fi
  cp "$OUT"/tables/* "$KEEP"/ 2>/dev/null || true
}
if [[ -n "${KEEP:-}" ]]; then
  (while sleep 60; do keep; done) >/dev/null 2>&1 &
  trap "kill $!; keep" EXIT
fi
names="$(IFS=,; echo "${others[*]}")"
some=(--rivals "$names") # of what is compiled: all, where all will be trained
[[ " $* " != *" second "* && " $* " != *" settings "* ]] || some=()
mkdir -p "$OUT"
[[ -z "${FROM:-}" ]] || "$PYTHON" "$here/kept_results.py" unpack "$FROM" "$OUT"
for stage in "$@"; do
  echo "$(date +%H:%M:%S) $stage"
  case "$stage" in
    compile)
      "$PYTHON" "$here/rivals.py" compile "${given[@]}" --limit 240 "${some[@]}" & compiling=$!
      draw --untrained || echo "not all drawn"
      wait $compiling ;;
    first)
      train --rivals "$names" || echo "not all trained"
      draw --rivals "$names" || echo "not all drawn"
      table --rivals "$names" || echo "not whole" ;;
    second)
      train || echo "not all trained"
      draw || echo "not all drawn"
      table ;;
    settings)
      read -ra try <<<"${TRY:-}"
      "$PYTHON" "$here/rival_settings.py" "${given[@]}" --at-once "$AT_ONCE" "${try[@]}" ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
  esac
done
