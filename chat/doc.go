// Package chat turns rows of data, as people have them, into texts and conversations.
//
// A [Row] has columns: the keys of a JSON object, or the header of a table. [Columns.Read] tells by
// their names what a row is ([Kinds] has the table), and which of its words are learned. Columns
// that have other names are given theirs in a [Columns].
package chat
