// Package link turns TCP between the processes of a run into authenticated links: shards of arrays,
// short messages of the host, and heartbeats.
//
// A [Hub] is a process's one listener. [Hub.Join] opens control connections, over which heartbeats
// report what each process does; [Hub.Wire] makes one end of a link to another process, which
// carries shards of arrays (Send, Recv) and messages (Tell, Hear) in the order of sending.
// Connections are TLS 1.3 between holders of one secret, or stay on the loopback interface.
package link
