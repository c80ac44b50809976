package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/internal/stubcuda"
)

// A set holds lines.
type set map[string]int

func (s set) without(o set) (list []string) {
	for _, line := range slices.Sorted(maps.Keys(s)) {
		if o[line] == 0 {
			list = append(list, line)
		}
	}
	return list
}

func list(before string, lines []string) {
	if len(lines) == 0 {
		fmt.Println(before + "none")
	}
	for _, line := range lines {
		fmt.Println(before + line)
	}
}

// tell prints what only one of two sides has.
func tell(before, after *side, b, a set) {
	fmt.Printf("  with %s %d, with %s %d\n", before.version, len(b), after.version, len(a))
	fmt.Printf("  only with %s\n", after.version)
	list("    ", a.without(b))
	fmt.Printf("  only with %s\n", before.version)
	list("    ", b.without(a))
}

// linesOf gives the lines that a side writes to a file.
func linesOf(s *side, write func(*side) (string, error)) ([]string, error) {
	path, err := write(s)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(path)
	return strings.Split(strings.TrimSpace(string(text)), "\n"), err
}

// compareUses compares the lines of logs that tell what a plugin uses.
func compareUses(before, after *side, write func(*side) (string, error)) error {
	var sets [2]set
	for i, s := range []*side{before, after} {
		lines, err := linesOf(s, write)
		if err != nil {
			return err
		}
		sets[i] = set{}
		for _, line := range lines {
			if strings.HasPrefix(line, "driver: looks up ") || strings.HasPrefix(line, "ptx: ") {
				sets[i][line] = 1
			}
		}
	}
	tell(before, after, sets[0], sets[1])
	return nil
}

// compareCensuses compares programs one by one: what is new in one may be old in another.
func compareCensuses(before, after *side, write func(*side) (string, error)) error {
	var programs [2]map[string]set
	for i, s := range []*side{before, after} {
		lines, err := linesOf(s, write)
		if err != nil {
			return err
		}
		programs[i] = byProgram(lines)
	}
	both, b, a := changed(programs[0], programs[1])
	fmt.Printf("  %d programs compiled with both\n", both)
	fmt.Printf("  only with %s\n", after.version)
	list("    ", a)
	fmt.Printf("  only with %s\n", before.version)
	list("    ", b)
	return nil
}

// byProgram sorts lines "PROGRAM: LINE" by program.
func byProgram(lines []string) map[string]set {
	programs := map[string]set{}
	for _, line := range lines {
		name, what, ok := strings.Cut(line, ": ")
		if !ok {
			continue
		}
		if programs[name] == nil {
			programs[name] = set{}
		}
		programs[name][what] = 1
	}
	return programs
}

// changed lists what only one side has of programs that both have, with the program, or how many
// they are.
func changed(before, after map[string]set) (both int, b, a []string) {
	for name := range before {
		if after[name] != nil {
			both++
		}
	}
	return both, only(before, after), only(after, before)
}

func only(these, those map[string]set) (lines []string) {
	programs := map[string][]string{}
	for name := range these {
		if those[name] == nil {
			continue
		}
		for _, line := range these[name].without(those[name]) {
			programs[line] = append(programs[line], name)
		}
	}
	for _, line := range slices.Sorted(maps.Keys(programs)) {
		where := programs[line][0]
		if n := len(programs[line]); n > 1 {
			where = fmt.Sprintf("%d programs", n)
		}
		lines = append(lines, fmt.Sprintf("%s  (%s)", line, where))
	}
	return lines
}

// functionName matches the names of functions of NVIDIA's libraries.
var functionName = regexp.MustCompile(`^(?:cu|cuda|cublas|cublasLt|cudnn|nccl|nvml)[A-Z]\w{2,60}$`)

// namesIn finds such names among the texts of a plugin, each of which ends in a zero byte.
func namesIn(path string) (set, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	names := set{}
	for word := range bytes.SplitSeq(text, []byte{0}) {
		if len(word) > 4 && len(word) < 70 && (word[0] == 'c' || word[0] == 'n') &&
			functionName.Match(word) {
			names[string(word)] = 1
		}
	}
	return names, nil
}

// compareNames compares what the plugins could ask libraries for, and says which of the new names
// the software GPU has not even a stub for.
func compareNames(before, after *side) error {
	var sets [2]set
	for i, s := range []*side{before, after} {
		var err error
		if sets[i], err = namesIn(s.library); err != nil {
			return err
		}
	}
	fmt.Printf("\nnames of functions of libcuda, cudart, cuBLAS, cuDNN, NCCL and NVML in the plugin\n")
	tell(before, after, sets[0], sets[1])
	files, err := filepath.Glob("internal/softgpu/names/*.txt")
	if err != nil {
		return err
	}
	words := set{}
	for _, name := range stubcuda.Names() {
		words[name] = 1
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for word := range strings.FieldsSeq(string(text)) {
			words[word] = 1
		}
	}
	missing := slices.DeleteFunc(sets[1].without(sets[0]), func(name string) bool {
		return words[name] > 0 || words[name+"_v2"] > 0
	})
	fmt.Println("  new, and not in the software GPU's lists (internal/softgpu/names)")
	list("    ", missing)
	return nil
}

var (
	testLine = regexp.MustCompile(`(?m)^\s*--- (PASS|FAIL|SKIP): (\S+)`)
	// reason are the lines in which replay and the software GPU say why.
	reason = regexp.MustCompile(`(?m)^.*(DW\d{4} |not played: |NCCL fault|farther than|` +
		`element \d+: |^panic: ).*$`)
)

// verdict prints how many tests passed, which failed, and what they say.
func verdict(said string) {
	count := set{}
	var failed []string
	for _, m := range testLine.FindAllStringSubmatch(said, -1) {
		count[m[1]]++
		if m[1] == "FAIL" {
			failed = append(failed, m[2])
		}
	}
	fmt.Printf("  %d passed, %d failed, %d skipped\n", count["PASS"], count["FAIL"], count["SKIP"])
	slices.Sort(failed)
	for _, name := range slices.Compact(failed) {
		fmt.Println("  FAIL", name)
	}
	if len(failed) == 0 {
		return
	}
	said = strings.Join(reason.FindAllString(said, -1), "\n")
	seen := set{}
	for line := range strings.Lines(said) {
		if line = strings.TrimSpace(line); seen[line] == 0 {
			fmt.Println("   ", line)
		}
		seen[line]++
	}
}
