// Package diag turns a failure into a message a person can act on: a stable code, what went
// wrong, where, why, and what to type next.
//
// Every error that can reach a user is an [*Error]. Its code is a row of one catalogue
// (codes.tsv), which also fixes the exit status of the program, so that a scheduler can tell a
// plan that does not fit (3) from a stall that a restart may cure (5). Code below the command
// line returns such errors and never prints them; only the command prints, once.
//
//	return diag.New(diag.EngineMissing, "engine %q is not installed", name).
//		At("%s", dir).
//		Try("deepwell engine install %s", name)
//
// A program that handles errors tests for a code: errors.Is(err, diag.EngineMissing).
package diag
