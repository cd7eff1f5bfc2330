#!/usr/bin/env bash
# All figures of benchmarks/README.md on one GPU, a JSON file and a text each: benchmarks/figures.sh FOLDER
# First everything is compiled, all at once; then timed, one after the other with nothing beside it.
# STAGES="warm timed sweeps" and FIGURES="unguided one" choose; a figure that fails leaves its text, and the others go on.
set -u
out=${1:?"say where results go: benchmarks/figures.sh FOLDER"}
didi=${DIDI:-"python3 -m didi_instruct"}
stages=${STAGES:-"warm timed sweeps"}
chosen=${FIGURES:-"unguided one guided distill unguided64"}
mkdir -p "$out"

figures() { # the chosen ones
  for name in $chosen; do all_figures | grep "^$name|" || echo "no figure $name" >&2; done
}
all_figures() { # name, arguments when warming up, more when timed
  echo "unguided|--batch 16 --steps 16 --against plain,naive,ar,transformers|--repeat 5"
  echo "one|--batch 1 --steps 16|--repeat 20"
  echo "guided|--guided --batch 16 --steps 16 --against plain,naive|--repeat 3"
  echo "distill|--distill --batch 8 --against on,plain,naive|--repeat 10"
  echo "unguided64|--batch 16 --steps 64 --against naive|--repeat 3"
}

if [[ $stages == *warm* ]]; then
  while IFS="|" read -r name arguments _; do
    $didi bench --arch small $arguments --repeat 1 > "$out/$name.warm.txt" 2>&1 &
  done < <(figures)
  wait
fi
if [[ $stages == *timed* ]]; then
  while IFS="|" read -r name arguments more; do
    $didi bench --arch small $arguments $more --json "$out/$name.json" > "$out/$name.txt" 2>&1
    tail -8 "$out/$name.txt"
  done < <(figures)
fi
if [[ $stages == *sweeps* ]]; then
  for sweep in "steps --batch 16 --repeat 1" "length --batch 4 --no-fast --repeat 3" \
    "batch --no-fast --repeat 3" "vocabulary --batch 16 --no-fast --repeat 3"; do
    name=${sweep%% *}
    $didi bench --arch small --sweep $sweep --json "$out/$name.json" > "$out/$name.txt" 2>&1
    tail -16 "$out/$name.txt"
  done
fi
