// The official Go client, unchanged, against a broker: one line a scenario, ok or FAIL and why.
//
// Usage: danube-compat URL [SCENARIO...].  A scenario that needs the broker restarted prints @restart, or
// @kill for SIGKILL to all of it, and waits for a line on standard input.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

const scenarioTimeout = 60 * time.Second

var input = bufio.NewReader(os.Stdin)

type scenario struct {
	name string
	run  func(ctx context.Context, url, topic string) error
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: danube-compat URL [SCENARIO...]")
		os.Exit(2)
	}
	url, wanted := os.Args[1], os.Args[2:]
	failed := false
	for _, one := range scenarios {
		if len(wanted) > 0 && !slices.Contains(wanted, one.name) {
			continue
		}
		if err := bounded(one, url); err != nil {
			failed = true
			fmt.Printf("FAIL %s: %s\n", one.name, strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			fmt.Printf("ok %s\n", one.name)
		}
	}
	if failed {
		os.Exit(1)
	}
}

func bounded(one scenario, url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), scenarioTimeout)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if fault := recover(); fault != nil {
				done <- fmt.Errorf("the client panicked: %v", fault)
			}
		}()
		done <- one.run(ctx, url, "/default/go-"+one.name)
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(scenarioTimeout + time.Second):
		return fmt.Errorf("not done within %s", scenarioTimeout)
	}
}

// askFor has the runner do something to the broker, and waits until it is done.
func askFor(word string) error {
	fmt.Println(word)
	_, err := input.ReadString('\n')
	return err
}
