// Package price turns operations and collectives on a machine into seconds.
//
// An operation costs what the card's peaks and memory allow, corrected by tables of what was
// measured, and by the constants of the software that runs it: a [Profile]. The same plan differs
// by stack and by release, so a profile has a name, and says where its constants come from.
package price
