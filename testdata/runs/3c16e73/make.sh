#!/usr/bin/env bash
# Writes the fixture: three runs stopped half way by a binary of commit 3c16e73, and what that binary
# itself printed for the rest. usage: make.sh DEEPWELL OUT   (DEEPWELL: built from 3c16e73)
set -euo pipefail
deepwell=$1 out=$2 here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out" && cp -r "$here"/{text,run.toml,config.json,stages.json,make.sh} "$out"
cd "$out"
"$deepwell" data tokenizer text --vocab 280 -o tokenizer.json
f32='--set precision=f32'
one() { "$deepwell" train run.toml --set out="$1" $f32 "${@:2}"; }
few() { "$deepwell" train run.toml --set out="$1" --set precision=mxfp8 "${@:2}"; }
two() { "$deepwell" train run.toml --set out="$1" $f32 --set micro=1 --plan stages.json "${@:2}"; }
for kind in one few two; do
  "$kind" "$kind" --until 3
  cp -r "$kind" whole
  "$kind" whole
  python3 - "$kind" <<'P'
import json,sys
rows=[json.loads(l) for l in open('whole/events.jsonl')]
kept=[{k:r[k] for k in ('step','loss')} for r in rows if r.get('kind')=='step' and r['step']>3]
json.dump(kept,open(sys.argv[1]+'.json','w'),indent=1); open(sys.argv[1]+'.json','a').write('\n')
P
  rm -rf whole
done
"$deepwell" policy llama3.1-8b nvfp4 -o policy.json
"$deepwell" plan llama3.1-70b --cluster 64xb200 --precision mxfp8 \
  --fix 'pp=4,schedule=zb-h1,recompute=attn+mlp' -o plan.json
"$deepwell" plan deepseek-v3 --cluster 256xgb200 -o moe.json
