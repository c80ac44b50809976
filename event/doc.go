// Package event turns what happens inside Deepwell into typed facts, and facts into JSON lines,
// plain lines or one live line.
//
// A stage never prints: it emits an [Event] into a [Sink], and the command decides how it is
// shown. [NewJSON] writes one object a line, which [Read] reads back and every report is made
// from; [Open] does so to a file that outlives kills, from which [Curve] reads the course of a run;
// [NewPlain] writes a line a fact for pipes and log files; [NewLive] keeps one line of a terminal
// up to date. Kinds of event are rows of one table, so that a file written by an older
// or newer binary still reads: an unknown kind comes back as [Unknown], nothing is lost.
//
// The clock is passed in. Nothing here asks the machine for the time.
package event
