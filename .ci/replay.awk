# Condenses what TestReplay logs: one line for each plan and precision, with the result array that
# is nearest to its bound in each mode. Everything else, errors above all, stays as it is.
/replay_test.go:[0-9]+: .*; bound / {
  sub(/^.*replay_test.go:[0-9]+: /, "")
  model = format = $0
  sub(/,.*/, "", model)
  sub(/^[^,]*, /, "", format); rest = format
  sub(/:.*/, "", format)
  sub(/^[^:]*: /, "", rest)
  split(rest, part, ", ") # plan, program, mode: worst W (array)
  worst = rest
  sub(/^.*: worst /, "", worst); sub(/[ ,].*/, "", worst)
  array = (match(rest, /\([^)]*\)/) ? substr(rest, RSTART + 1, RLENGTH - 2) : "")
  bound = rest
  sub(/^.*; bound /, "", bound); sub(/;.*/, "", bound)
  key = part[1] ", " format
  if (!(key in programs)) order[++n] = key
  if (!((key, model, part[2]) in seen)) programs[key]++
  seen[key, model, part[2]] = 1
  if (bound + 0 == 0) { exact[key]++; next }
  mode = part[3] ~ /^bf16 held/ ? "wide" : bound + 0 <= 1e-6 ? "sums" : "plain"
  count[key, mode]++
  ratio = worst / bound
  if (!((key, mode) in most) || ratio > most[key, mode]) {
    most[key, mode] = ratio
    text[key, mode] = worst " of " bound (array == "" ? "" : " (" array ", " model "'s " part[2] ")")
  }
  next
}
{ print }
END {
  split("wide sums plain", modes, " ")
  name["wide"] = "bf16 held as f32"; name["sums"] = "sums in f32"; name["plain"] = "bf16 as it is"
  for (i = 1; i <= n; i++) {
    key = order[i]
    line = key ": " programs[key] " program" (programs[key] > 1 ? "s" : "")
    total += programs[key]
    if (exact[key]) line = line "; " exact[key] " compared by bits"
    for (j = 1; j <= 3; j++) if (count[key, modes[j]]) line = line "; " name[modes[j]] ": " \
      count[key, modes[j]] ", worst " text[key, modes[j]]
    print line | "sort"
  }
  close("sort")
  print total " programs in all"
}
