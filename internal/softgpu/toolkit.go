package softgpu

import (
	"os"
	"path/filepath"
	"strings"
)

// ptxasScript stands where XLA looks for ptxas. It runs the real one, marks the cubin in bytes of
// its header that have no use, and appends the mark, the length of the PTX and the PTX;
// driver_module.c reads it. XLA starts it without an environment, so it knows the real one's path
// itself.
const ptxasScript = `#!/bin/sh
PATH=/usr/bin:/bin
real='REAL'
output= input= before=
for word in "$@"; do
  if [ "$before" = -o ] || [ "$before" = --output-file ]; then
    output=$word
  elif [ -f "$word" ]; then
    input=$word
  fi
  before=$word
done
"$real" "$@" || exit
[ -n "$output" ] && [ -n "$input" ] || exit 0
printf dwptx | dd of="$output" bs=1 seek=9 conv=notrunc 2>/dev/null || exit
{ printf 'dwptx%016x' "$(wc -c <"$input")" && cat "$input"; } >>"$output"
`

// writeToolkit makes a folder that XLA takes for a CUDA toolkit.
func writeToolkit(dir, real string) error {
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		return err
	}
	path := strings.ReplaceAll(filepath.Join(real, "bin", "ptxas"), "'", `'\''`)
	script := strings.ReplaceAll(ptxasScript, "REAL", path)
	if err := os.WriteFile(filepath.Join(dir, "bin", "ptxas"), []byte(script), 0o755); err != nil {
		return err
	}
	return os.Symlink(filepath.Join(real, "nvvm"), filepath.Join(dir, "nvvm"))
}
