/* Contract of the gate, at which workers let consumers pass where only one thread can be attached at a time (the GIL).
 *
 * A thread that asks for the GIL of a busy interpreter gets it after 5 ms, and after as long again for each other
 * thread that asks, in pure Python code. A consumer whose batch is ready should not wait for that: it asks here first,
 * and workers that come by, between items or on their way in, stand aside, detached, until it has passed. They do not
 * wait for ever, because the consumer may have found the way in barred by somebody else.
 *
 * One gate for the process, since there is one GIL. Any thread may call anything. */
#ifndef DLRS_GATE_H
#define DLRS_GATE_H

#include <stdbool.h>

/* A consumer is about to attach; and has. */
void dlrs_gate_ask(void);
void dlrs_gate_passed(void);

/* Look, after asking, whether a worker stands aside, for `most_ns`: whoever asks for the GIL before it is free sleeps,
 * and is woken late. True if one does. */
bool dlrs_gate_look(uint64_t most_ns);

/* Does any consumer ask? */
bool dlrs_gate_is_asked(void);

/* Stand aside, detached, until no consumer asks; for 2 ms at most. `looks`: there is a processor to spare for looking
 * whether it has passed. */
void dlrs_gate_stand_aside(bool looks);

/* In the child of a fork: the consumers that asked are not there. */
void dlrs_gate_reset(void);

#endif
