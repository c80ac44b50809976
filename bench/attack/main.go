// Command attack kills, stops and damages training runs, and counts what is lost: processes killed
// with kill -9 at random moments, one of two processes suspended with SIGSTOP, and checkpoints
// changed in every way that a disk can. A run that was attacked must end with the bits of one that
// was left alone.
//
//	go run ./bench/attack -kills 140 -stops 60 -damaged 400 -soak 2000
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// An attack is one invocation.
type attack struct {
	ctx    context.Context
	binary string // of deepwell
	work   string // a folder of its own
	root   string // of the repository, for a tokenizer and some text
	random *rand.Rand
	failed int
}

func main() {
	kills := flag.Int("kills", 140, "processes to kill, half of them of a run in two processes")
	stops := flag.Int("stops", 60, "processes to suspend, of a run in two processes")
	damaged := flag.Int("damaged", 400, "checkpoints to damage")
	soak := flag.Int("soak", 2000, "steps of the run that must raise no alarm")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "of all that is random")
	flag.Parse()
	if err := run(*kills, *stops, *damaged, *soak, *seed); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(kills, stops, damaged, soak int, seed uint64) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "attack-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	a := &attack{ctx: context.Background(), binary: filepath.Join(work, "deepwell"), work: work,
		root: root, random: rand.New(rand.NewPCG(seed, 0))}
	fmt.Printf("seed %d\n", seed)
	build := exec.Command("go", "build", "-o", a.binary, "./cmd/deepwell")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return err
	}
	reference, err := a.whole()
	if err != nil {
		return err
	}
	for _, part := range []func() error{
		func() error { return a.killOne(kills/2, reference) },
		func() error { return a.killTwo(kills-kills/2, stops, reference) },
		func() error { return a.damage(damaged, reference) },
		func() error { return a.soak(soak) },
	} {
		if err := part(); err != nil {
			return err
		}
	}
	if a.failed > 0 {
		return fmt.Errorf("%d attacks did harm", a.failed)
	}
	fmt.Println("no attack did harm")
	return nil
}

// harm reports what an attack did that it must not.
func (a *attack) harm(format string, args ...any) {
	a.failed++
	fmt.Printf("HARM: "+format+"\n", args...)
}
