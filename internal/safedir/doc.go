// Package safedir turns the path of a folder into files that do not lead out of it.
//
// Models come from strangers, and what a link leads to would be read as theirs, or copied into an
// export. A link may stay within the folder; one that leaves it, a file with a second name that may
// be outside, and what is no file at all are refused.
package safedir
