// Package trace turns what happens in a few steps of a run into a file that Perfetto and Chrome
// show: spans on named tracks, and counters.
//
// The file is the array form of Chrome's trace events, whose closing bracket may be missing: it is
// written event by event, and what a kill leaves behind still opens. A nil [Writer] is a trace
// that nobody asked for: its tracks take spans and write nothing, so that code that is traced has
// no conditions in it.
//
//	loop := t.Track("host", "loop")
//	end := loop.Span("gradient")
//	...
//	end(trace.Arg{Name: "tokens", Value: 4096})
package trace
