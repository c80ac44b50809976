package diag

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
)

// A Class is the exit status of the program when an error ends it.
type Class int

// The exit classes of every command.
const (
	Failed   Class = 1 // something went wrong
	Usage    Class = 2 // the command or its input is not well formed
	NoFit    Class = 3 // the plan does not fit the machine
	Numerics Class = 4 // a numerics guard stopped the run
	Stalled  Class = 5 // no progress; a restart may help

	// A run that was stopped by a signal and saved what it did ends as shells expect it: 128 and the
	// number of the signal. SIGHUP counts as SIGTERM.
	Interrupted Class = 130 // SIGINT, which Ctrl-C sends
	Terminated  Class = 143 // SIGTERM
)

// Restart tells a launcher whether starting the same command again may help: a run then goes on
// from its newest checkpoint.
func (c Class) Restart() bool { return c == Stalled }

// An Error is a failure with everything a person needs to mend it. The zero value of each text
// means "nothing to say"; only Code and What are always set.
type Error struct {
	Code  Code   // row of the catalogue
	What  string // what went wrong, in one line
	Where string // file, line, device, layer: the place to look at
	Cause string // the deeper reason, where one is known
	Fix   string // what to type or change next
	Err   error  // the wrapped error, if any

	exit Class // instead of the catalogue's, if not 0
}

// New returns an error of the given code.
//
//go:noinline
func New(code Code, format string, args ...any) *Error {
	return &Error{Code: code, What: fmt.Sprintf(format, args...)}
}

// At returns a copy of e that names the place.
//
//go:noinline
func (e *Error) At(format string, args ...any) *Error {
	c := *e
	c.Where = fmt.Sprintf(format, args...)
	return &c
}

// Because returns a copy of e that gives the deeper reason in words.
//
//go:noinline
func (e *Error) Because(format string, args ...any) *Error {
	c := *e
	c.Cause = fmt.Sprintf(format, args...)
	return &c
}

// Try returns a copy of e that says what to do next.
//
//go:noinline
func (e *Error) Try(format string, args ...any) *Error {
	c := *e
	c.Fix = fmt.Sprintf(format, args...)
	return &c
}

// Meant returns a copy of e whose fix is a known word that is near the typed one, as format says
// it, or else otherwise.
func (e *Error) Meant(typed string, known []string, format, otherwise string) *Error {
	if near := Nearest(typed, known); near != "" {
		return e.Try(format, near)
	}
	return e.Try("%s", otherwise)
}

// Wrap returns a copy of e that wraps err; the text of err becomes the cause if none was given
// and it says more than the error itself. A FileError without a fix gets one that fits the system's
// error.
func (e *Error) Wrap(err error) *Error {
	c := *e
	c.Err = err
	if c.Cause == "" && err != nil && err.Error() != e.What && err.Error() != e.Code.Error() {
		c.Cause = err.Error()
	}
	if c.Code == FileError && c.Fix == "" {
		c.Fix = fileFix(err)
	}
	return &c
}

// fileFix says what to do about an error of the file system; "" if nothing is known.
func fileFix(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "check the path; its folder must exist"
	case errors.Is(err, fs.ErrPermission):
		return "choose a path that this user may use, or change its permissions"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "free space on the disk, or choose another one"
	case errors.Is(err, syscall.EROFS):
		return "choose a path on a file system that can be written"
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR):
		return "check the path: it mixes up a file and a folder"
	}
	return ""
}

// Exit returns a copy of e that ends the program with another status than the catalogue has, once
// it reaches the command: Exit itself ends nothing.
func (e *Error) Exit(c Class) *Error {
	n := *e
	n.exit = c
	return &n
}

// Error gives the message on one line, for logs and for wrapping.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", e.Code, e.What)
	for _, part := range []struct{ name, text string }{
		{"at", e.Where}, {"because", e.Cause}, {"fix:", e.Fix},
	} {
		if part.text != "" {
			fmt.Fprintf(&b, "; %s %s", part.name, oneLine(part.text))
		}
	}
	return b.String()
}

// Unwrap lets errors.Is and errors.As look through e.
func (e *Error) Unwrap() error { return e.Err }

// Is reports whether target is the error's code, or an Error of the same code, so that callers test
// for a row of the catalogue with errors.Is(err, diag.EngineMissing).
func (e *Error) Is(target error) bool {
	if t, ok := target.(*Error); ok {
		return t.Code == e.Code
	}
	return target == e.Code
}

// Class gives the exit class that the catalogue has for the error's code, unless Exit set another.
func (e *Error) Class() Class {
	if e.exit != 0 {
		return e.exit
	}
	return e.Code.class()
}

// Format gives the message as a person sees it on a terminal, one fact a line.
func (e *Error) Format() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s\n", e.Code, e.What)
	for _, part := range []struct{ name, text string }{
		{"where", e.Where}, {"cause", e.Cause}, {"fix", e.Fix},
	} {
		if part.text == "" {
			continue
		}
		text := strings.ReplaceAll(strings.TrimSpace(part.text), "\n", "\n         ")
		fmt.Fprintf(&b, "  %-5s  %s\n", part.name, text)
	}
	return b.String()
}

// MarshalJSON gives the error as a program reads it.
func (e *Error) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Code  Code   `json:"code"`
		What  string `json:"what"`
		Where string `json:"where,omitempty"`
		Cause string `json:"cause,omitempty"`
		Fix   string `json:"fix,omitempty"`
		Exit  Class  `json:"exit"`
	}{e.Code, e.What, e.Where, e.Cause, e.Fix, e.Class()})
}

// From finds the Error in err's chain. A Code in the chain without an Error becomes one that says
// what the code means; any other error becomes one with code Internal, because an error without a
// code that reaches a user is our own fault.
//
// From(nil) is a nil *Error. As a result of the type error that is not nil, so a function that
// returns error checks err before it returns From(err).
func From(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	if c, ok := errors.AsType[Code](err); ok {
		return New(c, "%s", c.meaning()).Wrap(err)
	}
	return New(Internal, "%s", err).Wrap(err).Try("please report this: it should have a code")
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
