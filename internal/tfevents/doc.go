// Package tfevents turns events of a run into the files that TensorBoard shows.
//
// A file is a row of records, each with its length and two checksums; a record is a protocol
// buffer, written here field by field, since of the whole schema a handful of fields is needed. A
// resumed run writes another file, which tells TensorBoard from which step on older ones no longer
// count.
package tfevents
