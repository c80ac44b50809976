package isolate

import (
	"bytes"
	"io"
	"regexp"
	"strings"
)

// Bounds on what is kept of a child's last words.
const (
	maxLine = 4 << 10
	maxKept = 8 << 10
)

var (
	// lastWords begin the account of a crash: by Abseil, C++, the C library, LLVM or Go.
	lastWords = regexp.MustCompile(`^(F\d{4} |terminate called|SIG[A-Z]+: |fatal error: |panic: |` +
		`runtime: |LLVM ERROR|\*\*\* |free\(\): |malloc\(\): |double free|` +
		`(malloc_)?corrupted |munmap_chunk|stack smashing)`)
	// preamble is Abseil's notice about its own log.
	preamble = regexp.MustCompile(`^WARNING: All log messages before absl::InitializeLog`)
	goSignal = regexp.MustCompile(`^(SIG[A-Z]+): `)
	absl     = regexp.MustCompile(`^F\d{4} [^\]]*\] *(.+)`)
	thrown   = regexp.MustCompile(`^ *what\(\): *(.+)`)
)

// A journal takes what a child writes to its standard error. It passes lines on as they come, up to
// the lines of a crash: it keeps the first few of these, and the user gets one error instead.
type journal struct {
	out    io.Writer
	line   []byte   // that has no end yet
	before string   // last line that was passed on
	kept   []string // of the crash
	size   int      // bytes in kept
	signal string   // that Go's account names
}

// Write implements io.Writer.
func (j *journal) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		part, rest, whole := bytes.Cut(p, []byte("\n"))
		j.line = append(j.line, part[:min(len(part), maxLine-len(j.line))]...)
		if p = rest; whole {
			j.take(string(j.line))
			j.line = j.line[:0]
		}
	}
	return n, nil
}

// end takes a last line without an end.
func (j *journal) end() {
	if len(j.line) > 0 {
		j.take(string(j.line))
		j.line = nil
	}
}

func (j *journal) take(line string) {
	if len(j.kept) == 0 && !lastWords.MatchString(line) {
		if strings.TrimSpace(line) != "" && !preamble.MatchString(line) {
			j.before = line
			_, _ = io.WriteString(j.out, line+"\n")
		}
		return
	}
	if j.size += len(line); j.size <= maxKept {
		j.kept = append(j.kept, line)
	}
	if m := goSignal.FindStringSubmatch(line); m != nil && j.signal == "" {
		j.signal = m[1]
	}
}

// reason picks the line that says most about a crash, or "".
func (j *journal) reason() string {
	for _, form := range []*regexp.Regexp{absl, thrown} {
		for _, line := range j.kept {
			if m := form.FindStringSubmatch(line); m != nil {
				return strings.TrimSpace(m[1])
			}
		}
	}
	for _, line := range j.kept {
		if !goSignal.MatchString(line) && lastWords.MatchString(line) {
			return strings.TrimSpace(line)
		}
	}
	return strings.TrimSpace(j.before)
}
